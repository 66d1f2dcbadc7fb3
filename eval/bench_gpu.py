"""The speed table: what captures cost on a GPU, as ratios measured in one run: ``make bench-gpu``.

Run as ``python -m core_rerank.eval.bench_gpu``, or from a checkout that is not installed as
``python -m eval.bench_gpu``. By default the model is Mistral-7B's shape with random weights and the
heads are CoRe's for it. Every ratio is the median over repeats of which the sides alternate, with
its 95 % bootstrap interval; the JSON file is written again after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import gpu_rows, shapes, workloads
from .bench_report import RESULTS, Figure, Report, Row, environment, print_table
from .gpu_engines import GPU_SHARE, Engines, engine_arguments, plain_llm
from .gpu_rows import Load

if TYPE_CHECKING:
    from hook_runtime.specs import Head

FULL = ("full", "generation", "mixed", "full-memory")
EXIT = ("exit", "warm", "exit-memory")
MAIN = (*FULL, *EXIT)
OPTIONAL = ("profile", "sweep", "rivals", "data-parallel")
SWEEP = (2048, 5120, 8192, 16384, 32768)
CEILING_SIZE = 8192
RIVAL_SHARE = 0.1
"""Of the GPU's memory for a cross-encoder, beside core-rerank's engine."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run: the rows by name, and the budget after which no more engines are started."""

    engines: Engines
    load: Load
    rows: tuple[str, ...]
    sweep: tuple[int, ...]
    gpus: int
    budget_s: float
    ceiling_size: int
    tokenizer: Path
    profile: Path | None
    cross_encoder: Path | None


class GpuBench:
    """Starts engines phase by phase and measures the rows that each phase holds."""

    def __init__(self, settings: Settings, report: Report, tick: Callable[[], object]) -> None:
        self._s = settings
        self._report = report
        self._tick = tick
        self._start = time.monotonic()
        self._tried: set[str] = set()
        self._heads: tuple[Head, ...] = settings.engines.heads

    def run(self) -> None:
        """All phases that a wanted row belongs to."""
        phases: tuple[tuple[tuple[str, ...], Callable[[], None]], ...] = (
            (FULL, self._full),
            ((*EXIT, "profile"), self._exit),
            (("rivals",), self._rivals),
            (("data-parallel",), self._data_parallel),
            (("sweep",), self._sweep),
        )
        for names, phase in phases:
            wanted = [name for name in names if name in self._s.rows]
            if wanted:
                self._guarded(wanted, phase)

    # ------------------------------------------------------------ phases

    def _full(self) -> None:
        """All layers: a hooked engine and an unhooked one."""
        s = self._s
        with ExitStack() as stack:
            hooked = stack.enter_context(s.engines.hooked(early_exit=False))
            needed = {"full", "generation"} & set(s.rows)
            plain = stack.enter_context(s.engines.unhooked(early_exit=False)) if needed else None
            self._about(hooked)
            self._row("full", lambda: self._captured(hooked, plain))
            self._row("generation", lambda: gpu_rows.generation(hooked, plain, s.load, self._tick))
            self._row("mixed", lambda: gpu_rows.mixed(hooked, s.load, self._heads, self._tick))
            self._row("full-memory", lambda: gpu_rows.memory(hooked))

    def _exit(self) -> None:
        """The early exit's layers: a hooked engine and an unhooked one."""
        s = self._s
        with ExitStack() as stack:
            hooked = stack.enter_context(s.engines.hooked(early_exit=True))
            needed = "exit" in s.rows
            plain = stack.enter_context(s.engines.unhooked(early_exit=True)) if needed else None
            self._about(hooked)
            self._row("exit", lambda: self._captured(hooked, plain))
            self._row("warm", lambda: gpu_rows.warm(hooked, s.load, self._heads, self._tick))
            self._row("exit-memory", lambda: gpu_rows.memory(hooked))
            self._row("profile", lambda: self._profile(hooked))

    def _sweep(self) -> None:
        for tokens in self._s.sweep:
            self._guarded([f"sweep: {tokens}"], lambda tokens=tokens: self._sweep_step(tokens))

    def _sweep_step(self, tokens: int) -> None:
        s = self._s
        with s.engines.hooked(early_exit=True, max_num_batched_tokens=tokens) as hooked:
            self._about(hooked)
            step = (hooked, tokens, s.load, self._heads, self._tick)
            self._row("sweep", lambda: gpu_rows.sweep_step(*step), part=str(tokens))

    def _rivals(self) -> None:
        """core-rerank with an early exit beside each rival, all on unseen documents."""
        from .rivals import CoreRanker, ListwiseRanker, VllmScoreRanker

        s = self._s
        with s.engines.hooked(early_exit=True) as hooked:
            self._about(hooked)
            core = CoreRanker(hooked, heads=self._heads)
            with s.engines.hooked(early_exit=False) as full:
                limit = full.model.max_model_len
                rival = ListwiseRanker(full, full.tokenizer, limit)
                self._row("rivals", lambda: self._rival(rival, core, hooked, 0), part=rival.name)
            with tempfile.TemporaryDirectory() as folder:
                model = s.cross_encoder
                if model is None:
                    model = shapes.qwen3_06b_classifier(Path(folder), s.tokenizer)
                with plain_llm(str(model), runner="pooling", **self._cross_arguments()) as llm:
                    score = VllmScoreRanker(llm)
                    self._row(
                        "rivals", lambda: self._rival(score, core, hooked, 1), part=score.name
                    )

    def _data_parallel(self) -> None:
        asyncio.run(self._data_parallel_async())

    async def _data_parallel_async(self) -> None:
        import hook_runtime

        s = self._s
        engine: Any = getattr(hook_runtime, "AsyncHookLLM", None)
        if engine is None:
            self._report.leave_out("data-parallel", "not run: hook_runtime has no AsyncHookLLM")
            return
        tokenizer = _tokenizer(s.engines.model)

        seeds = itertools.count()

        def pairs() -> list[workloads.Pair]:
            twice = itertools.islice(seeds, 2)
            return [pair for n in twice for pair in s.load.pairs(tokenizer, self._heads, seed=n)]

        model, options = str(s.engines.model), dict(s.engines.arguments)
        options |= {"heads": self._heads, "layers": "auto"}
        async with await engine.start(model, data_parallel_size=s.gpus, **options) as several:
            self._about(several)
            repeats = s.load.repeats
            row = await gpu_rows.data_parallel(several, s.gpus, pairs, repeats, self._tick)
            self._report.add(row)

    # ------------------------------------------------------------ rows

    def _captured(self, hooked: Any, plain: Any) -> list[Row | Figure]:
        s = self._s
        rows = gpu_rows.captured_against_plain(hooked, plain, s.load, self._heads, self._tick)
        figures = gpu_rows.floor(hooked, s.engines.config, s.load, self._heads, s.ceiling_size)
        return [*rows, *figures, *gpu_rows.floor_share(rows, figures)]

    def _rival(self, rival: Any, core: Any, hooked: Any, number: int) -> list[Row | Figure]:
        load = self._s.load
        first = (number + 1) * (load.repeats + 1)  # each rival has documents of its own
        texts = [load.texts(hooked.tokenizer, n) for n in range(first, first + load.repeats + 1)]
        return gpu_rows.seconds_per_query(rival, core, load, texts, self._tick)

    def _profile(self, hooked: Any) -> list[Row | Figure]:
        from core_rerank.commands.terminal import write_text

        assert self._s.profile is not None
        write_text(self._s.profile, gpu_rows.profiled(hooked, self._s.load, self._heads) + "\n")
        return []

    # ------------------------------------------------------------ keeping going

    def _row(self, row: str, measure: Callable[[], Sequence[Row | Figure]], part: str = "") -> None:
        """Measure one row, or a ``part`` of it, if it is wanted; a fault costs no other row."""
        if row not in self._s.rows:
            return
        self._tried.add(row)
        try:
            self._report.add(*measure())
        except Exception as error:
            self._failed(f"{row}: {part}" if part else row, error)

    def _guarded(self, rows: Sequence[str], phase: Callable[[], None]) -> None:
        """Start a phase's engines unless the budget is spent; a fault costs the rows to come."""
        if time.monotonic() - self._start > self._s.budget_s:
            for row in rows:
                self._report.leave_out(row, "not run: budget")
            return
        try:
            phase()
        except Exception as error:
            for row in [row for row in rows if row not in self._tried] or rows[-1:]:
                self._failed(row, error)

    def _failed(self, row: str, error: Exception) -> None:
        traceback.print_exception(error)
        self._report.leave_out(row, f"failed: {type(error).__name__}: {error}"[:400])

    def _about(self, hooked: Any) -> None:
        """Note the device and the runner when the first engine runs."""
        self._report.about.setdefault("device", hooked.model.device)
        self._report.about.setdefault("dtype", hooked.model.dtype)
        self._report.about.setdefault("runner", hooked.runner)

    def _cross_arguments(self) -> dict[str, Any]:
        arguments = dict(self._s.engines.arguments)
        arguments["load_format"] = "dummy" if self._s.cross_encoder is None else "auto"
        if "gpu_memory_utilization" in arguments:
            arguments["gpu_memory_utilization"] = RIVAL_SHARE
        return arguments


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m core_rerank.eval.bench_gpu")
    add = parser.add_argument
    add("--model", type=Path, help="a model's folder, instead of Mistral-7B's shape")
    add("--load-format", default="dummy", help="auto reads the model's weights")
    add("--heads", nargs="+", default=list(shapes.CORE_HEADS), help="such as 15-7")
    add("--tokenizer", type=Path, help="folder of a tokenizer; by default SmolLM2's")
    add("--max-model-len", type=int, default=8192)
    add("--gpu-share", type=float, default=GPU_SHARE, help="of the GPU's memory, for each engine")
    Load.add_options(parser)
    add("--eager", action="store_true", help="compile nothing: for a quick trial")
    add("--rows", help=f"some of {','.join((*MAIN, *OPTIONAL))}; by default {','.join(MAIN)}")
    add("--sweep", nargs="*", type=int, help="also vary max_num_batched_tokens")
    add("--rivals", action="store_true", help="also listwise generation and a cross-encoder")
    add("--cross-encoder", type=Path, help="its folder, instead of Qwen3-0.6B's shape")
    add("--gpus", type=int, default=1, help="more than 1: also data parallel on so many")
    add("--profile", type=Path, metavar="FILE", help="also profile one captured batch, as text")
    add("--budget-s", type=float, default=float("inf"), help="start no more engines after so long")
    add("--ceiling-size", type=int, default=CEILING_SIZE, help="of the matrices multiplied")
    add("--out", type=Path, help="by default eval/results/bench-GPU.json")
    add("-v", "--verbose", action="store_true", help="show the engine's log")
    return parser


def _rows(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Names of the rows to measure."""
    named = arguments.rows.split(",") if arguments.rows else [*MAIN]
    unknown = [name for name in named if name not in (*MAIN, *OPTIONAL)]
    if unknown:
        parser.error(f"--rows knows {', '.join((*MAIN, *OPTIONAL))}, not {', '.join(unknown)}")
    asked = {
        "profile": arguments.profile is not None,
        "sweep": arguments.sweep is not None,
        "rivals": arguments.rivals,
        "data-parallel": arguments.gpus > 1,
    }
    if "profile" in named and arguments.profile is None:
        parser.error("the row profile needs --profile FILE")
    if "data-parallel" in named and arguments.gpus < 2:
        parser.error("the row data-parallel needs --gpus 2 or more")
    return tuple(dict.fromkeys([*named, *(name for name, on in asked.items() if on)]))


def device_name() -> str:
    """The GPU's name, or that of the processor's platform, as vLLM knows it."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else current_platform.get_device_name()


def slug(name: str) -> str:
    """A name for a file.

    >>> slug("NVIDIA H200")
    'nvidia-h200'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _settings(
    arguments: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path
) -> Settings:
    from hook_runtime.specs import Head

    tokenizer = shapes.tokenizer_folder(arguments.tokenizer or arguments.model)
    model = arguments.model or shapes.mistral_7b(folder, tokenizer)
    share = engine_arguments(arguments.max_model_len, arguments.load_format, arguments.gpu_share)
    if arguments.eager:
        share["enforce_eager"] = True
    heads = tuple(Head.parse(name) for name in arguments.heads)
    return Settings(
        engines=Engines(model, heads, share),
        load=Load.of(arguments),
        rows=_rows(arguments, parser),
        sweep=tuple(arguments.sweep or SWEEP),
        gpus=arguments.gpus,
        budget_s=arguments.budget_s,
        ceiling_size=arguments.ceiling_size,
        tokenizer=tokenizer,
        profile=arguments.profile,
        cross_encoder=arguments.cross_encoder,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: measure, print, write; 1 if a goal was clearly missed or a row failed."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _rows(arguments, parser)
    from tqdm import tqdm

    from core_rerank.commands.terminal import quiet_engine

    with tempfile.TemporaryDirectory() as folder, quiet_engine(arguments.verbose):
        settings = _settings(arguments, parser, Path(folder))
        device = device_name()
        about = {
            **environment(),
            "device_name": device,
            "model": str(arguments.model or "Mistral-7B's shape, random weights"),
            "heads": arguments.heads,
            "settings": {k: str(v) for k, v in vars(arguments).items() if v is not None},
        }
        report = Report(about, arguments.out or RESULTS / f"bench-{slug(device)}.json")
        with tqdm(desc="bench-gpu", unit="run") as bar:
            GpuBench(settings, report, lambda: bar.update(1)).run()
        report.about["seconds"] = round(bar.format_dict["elapsed"], 1)
        report.save()
    print_table(report, f"core-rerank bench on {device}")
    print(f"written to {report.path}")
    failed = any(reason.startswith("failed") for reason in report.missing.values())
    return int(failed or any(row.verdict == "missed" for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
