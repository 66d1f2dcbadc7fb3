"""How captures scale over GPUs: ``make bench-scale GPUS=N``.

Data parallel: the speed work of ``bench_gpu`` (Mistral-7B's shape) on 1, 2, 4, ... engines. Tensor
parallel: a 70B model's shape with 16 heads in its middle layers, cut after the last of them, split
over 1, 2, 4, ... GPUs. Weights are random. Every ratio is the median over alternating
repeats with its 95 % bootstrap interval; the JSON file is written again after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gpu_rows, shapes, workloads
from .bench_gpu import device_name, slug
from .bench_report import RESULTS, Figure, Report, Row, environment, print_table
from .gpu_engines import Engines, engine_arguments
from .gpu_rows import Load

if TYPE_CHECKING:
    from hook_runtime.specs import Head

GPU_SHARE = 0.9
"""Of each GPU's memory: one engine runs at a time."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What runs: the two models, the work, and how many GPUs there are."""

    data_parallel: Engines
    tensor_parallel: Engines
    load: Load
    gpus: int
    budget_s: float


def counts(gpus: int) -> list[int]:
    """Powers of two up to ``gpus``, and ``gpus``.

    >>> counts(6)
    [1, 2, 4, 6]
    """
    if gpus < 1:
        raise ValueError(f"--gpus must be at least 1, not {gpus}.")
    powers = [1 << i for i in range(gpus.bit_length())]
    return sorted({*powers, gpus} - {n for n in powers if n > gpus})


class ScaleBench:
    """Starts one engine after the other and measures its rows."""

    def __init__(self, settings: Settings, report: Report, tick: Callable[[], object]) -> None:
        self._s = settings
        self._report = report
        self._tick = tick
        self._start = time.monotonic()
        self._queries_per_second: dict[int, float] = {}

    def run(self) -> None:
        """Data parallel first, then every tensor parallel size."""
        self._guarded("data parallel", lambda: asyncio.run(self._data_parallel()))
        for size in counts(self._s.gpus):
            self._guarded(f"tensor parallel {size}", lambda size=size: self._tensor_parallel(size))

    async def _data_parallel(self) -> None:
        from hook_runtime import AsyncHookLLM

        s = self._s
        options = {**s.data_parallel.arguments, "heads": s.data_parallel.heads, "layers": "auto"}
        if s.gpus > 1:
            options["data_parallel_size"] = s.gpus
        model = str(s.data_parallel.model)
        async with await AsyncHookLLM.start(model, **options) as several:
            self._about(several.model)
            seeds = itertools.count()  # no prompt twice: the engines' caches are never emptied

            def pairs() -> list[workloads.Pair]:
                return [
                    pair
                    for seed in itertools.islice(seeds, s.gpus)
                    for pair in s.load.pairs(several.tokenizer, s.data_parallel.heads, seed)
                ]

            for count in counts(s.gpus)[1:]:
                row = await gpu_rows.data_parallel(
                    several, count, pairs, s.load.repeats, self._tick
                )
                self._report.add(row)
            several.use_engines(s.gpus)
            self._report.add(
                await gpu_rows.captured_beside_plain(
                    several, s.gpus, pairs, s.load.repeats, self._tick
                )
            )

    def _tensor_parallel(self, size: int) -> None:
        s = self._s
        heads: tuple[Head, ...] = s.tensor_parallel.heads
        with s.tensor_parallel.hooked(early_exit=True, tensor_parallel_size=size) as hooked:
            self._about(hooked.model)
            rows = gpu_rows.captured_against_plain(hooked, None, s.load, heads, self._tick)
            named = [_named(row, size) for row in rows]
            found: list[Row | Figure] = [*named, _returned(hooked, s.load, heads, size)]
            speeds = rows[0].speeds
            assert speeds is not None
            self._queries_per_second[size] = speeds[0]
            smallest = min(self._queries_per_second)
            linear = size / smallest * self._queries_per_second[smallest]
            what = f"tensor parallel {size}: captured queries/s / linear from {smallest}"
            found.append(Figure(what, speeds[0] / linear, "x", f"{speeds[0]:.4g} queries/s"))
            self._report.add(*found)

    def _guarded(self, row: str, phase: Callable[[], None]) -> None:
        """Run a phase unless the budget is spent; a fault costs that phase alone."""
        if time.monotonic() - self._start > self._s.budget_s:
            self._report.leave_out(row, "not run: budget")
            return
        try:
            phase()
        except Exception as error:
            traceback.print_exception(error)
            self._report.leave_out(row, f"failed: {type(error).__name__}: {error}"[:400])

    def _about(self, model: Any) -> None:
        self._report.about.setdefault("device", model.device)
        self._report.about.setdefault("dtype", model.dtype)


def _named(row: Row, size: int) -> Row:
    return replace(row, claim=f"tensor parallel {size}: {row.claim}")


def _returned(hooked: Any, load: Load, heads: tuple[Head, ...], size: int) -> Figure:
    """How much of a query's captures comes back from the workers."""
    pairs = load.pairs(hooked.tokenizer, heads)[:1]
    captures = hooked.capture([request for pair in pairs for request in pair])
    what = f"tensor parallel {size}: captures returned, a query and its null pass"
    return Figure(what, sum(c.values.nbytes for c in captures), "bytes")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core_rerank.eval.bench_scale")
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="how many there are")
    add("--tokenizer", type=Path, help="folder of a tokenizer; by default SmolLM2's")
    add("--model", type=Path, help="a model's folder, instead of both shapes")
    add("--heads", nargs="+", help="its heads, such as 2-1")
    add("--max-model-len", type=int, default=8192)
    Load.add_options(parser)
    add("--eager", action="store_true", help="compile nothing: for a quick trial")
    add("--budget-s", type=float, default=float("inf"), help="start no more engines after so long")
    add("--out", type=Path, help="by default eval/results/scale-GPU-xN.json")
    add("-v", "--verbose", action="store_true", help="show the engine's log")
    return parser


def _settings(arguments: argparse.Namespace, folder: Path) -> Settings:
    from hook_runtime.specs import Head

    tokenizer = shapes.tokenizer_folder(arguments.tokenizer or arguments.model)
    share = engine_arguments(arguments.max_model_len, "dummy", GPU_SHARE)
    if arguments.eager:
        share["enforce_eager"] = True
    if (arguments.model is None) != (arguments.heads is None):
        raise SystemExit("--model and --heads go together: heads are those of a model.")

    def engines(name: str, make: Callable[[Path, Path], Path], heads: Sequence[str]) -> Engines:
        model = arguments.model or make(folder / name, tokenizer)
        return Engines(model, tuple(map(Head.parse, arguments.heads or heads)), share)

    return Settings(
        engines("mistral-7b", shapes.mistral_7b, shapes.CORE_HEADS),
        engines("llama-70b", shapes.llama_70b, shapes.MIDDLE_HEADS_70B),
        Load.of(arguments),
        arguments.gpus,
        arguments.budget_s,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: measure, print, write; 1 if a row failed."""
    arguments = _parser().parse_args(argv)
    counts(arguments.gpus)
    from tqdm import tqdm

    from core_rerank.commands.terminal import quiet_engine

    with tempfile.TemporaryDirectory() as folder, quiet_engine(arguments.verbose):
        settings = _settings(arguments, Path(folder))
        device = device_name()
        about = {
            **environment(),
            "device_name": device,
            "gpus": arguments.gpus,
            "settings": {k: str(v) for k, v in vars(arguments).items() if v is not None},
        }
        path = arguments.out or RESULTS / f"scale-{slug(device)}-x{arguments.gpus}.json"
        report = Report(about, path)
        with tqdm(desc="bench-scale", unit="run") as bar:
            ScaleBench(settings, report, lambda: bar.update(1)).run()
    print_table(report, f"core-rerank on {arguments.gpus} x {device}")
    print(f"written to {report.path}")
    return int(any(reason.startswith("failed") for reason in report.missing.values()))


if __name__ == "__main__":
    sys.exit(main())
