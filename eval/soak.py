"""Thousands of captures through one engine: nothing may be left behind, and memory may grow no more
than under the same prompts without captures (vLLM on a CPU grows by itself for a while).

Run as ``python -m core_rerank.eval.soak`` (``make soak``); prints a table and writes a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_report import RESULTS, environment
from .files import write_whole
from .resident import resident_mib

if TYPE_CHECKING:
    import numpy as np

    from hook_runtime.engine import HookLLM
    from hook_runtime.specs import CaptureRequest, Head

BATCH = 100
PREFIXES = 20
"""Different beginnings that the prompts share, so that the prefix cache is hit and evicted."""
GROWTH = 0.02
"""Share of the resident memory by which it may grow more than it does without captures, from a
fifth of the requests to the end."""
TOLERANCE = 1e-4
"""Of a repeated request's answer against its first, relative to the largest value."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is held after so many requests: MiB in all processes, and the runtime's counts."""

    requests: int
    resident_mib: float
    kept: dict[str, int]


def make_request(number: int, heads: Sequence[Head]) -> CaptureRequest:
    """Deterministic; 40 to 120 tokens, with one of the shared beginnings and some of the heads."""
    from hook_runtime.specs import AttentionProbe, CaptureRequest

    chance = random.Random(number)
    beginning = random.Random(-1 - number % PREFIXES)
    ids = [beginning.randrange(10, 40_000) for _ in range(32)]
    ids += [chance.randrange(10, 40_000) for _ in range(chance.randrange(8, 88))]
    chosen = tuple(chance.sample(list(heads), chance.randrange(1, len(heads) + 1)))
    rows = (len(ids) - 6, len(ids) - 1)
    return CaptureRequest(tuple(ids), AttentionProbe(chosen, rows, ((2, 20), (22, rows[0]))))


def soak(
    engine: HookLLM, heads: Sequence[Head], requests: int, captured: bool, bar: Any
) -> list[Sample]:
    """Run them in batches; raises AssertionError where a repeated request's answer changes."""
    first: dict[int, np.ndarray] = {}
    samples = []
    for start in range(0, requests, BATCH):
        numbers = list(range(start, min(start + BATCH, requests)))
        numbers[::10] = [n % 50 for n in numbers[::10]]  # each tenth one was asked before
        batch = [make_request(n, heads) for n in numbers]
        if captured:
            for number, capture in zip(numbers, engine.capture(batch), strict=True):
                if number < 50:
                    _check_same(number, capture.values, first.setdefault(number, capture.values))
        else:
            _run_plain(engine, batch)
        bar.update(len(numbers))
        if (start // BATCH) % 5 == 4 or start + BATCH >= requests:
            held = resident_mib(os.getpid())
            samples.append(Sample(start + len(numbers), held, _total(engine.stats())))
    return samples


def _run_plain(engine: HookLLM, batch: Sequence[CaptureRequest]) -> None:
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    prompts: Any = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in batch]
    engine.llm.generate(prompts, one, use_tqdm=False)


def _check_same(number: int, got: np.ndarray, before: np.ndarray) -> None:
    error = float(abs(got - before).max() / abs(before).max())
    assert error <= TOLERANCE, f"request {number} changed its answer by {error:.1e}"


def _total(workers: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: sum(worker[name] for worker in workers) for name in workers[0]}


def growth(samples: Sequence[Sample]) -> float:
    """By what share the resident memory grew, from a fifth of the requests to the end."""
    settled = next(s for s in samples if s.requests >= samples[-1].requests / 5)
    return samples[-1].resident_mib / settled.resident_mib - 1


def faults(samples: Sequence[Sample], plain: Sequence[Sample]) -> list[str]:
    """What is not as it should be; ``plain`` are the samples of the run without captures."""
    found = []
    grown, alone = growth(samples), growth(plain)
    if grown > alone + GROWTH:
        found.append(
            f"resident memory grew by {grown:.3f} with captures and {alone:.3f} without, "
            f"{GROWTH} more allowed"
        )
    for sample in samples:
        left = {n: sample.kept[n] for n in ("requests", "results", "wrapped_layers")}
        if any(left.values()):
            found.append(f"after {sample.requests} requests the worker keeps {left}")
    if len({s.kept["shadow_bytes"] for s in samples}) > 1:
        found.append("the shadow changed its size")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: run, print, write; 1 if something was left behind or memory grew more."""
    parser = argparse.ArgumentParser(prog="python -m core_rerank.eval.soak")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="by default eval/results/soak-DEVICE.json")
    arguments = parser.parse_args(argv)
    from tqdm import tqdm

    from core_rerank.commands.terminal import quiet_engine
    from core_rerank.heads import find_head_set
    from core_rerank.models import resolve_model
    from hook_runtime.engine import HookLLM

    model = resolve_model(arguments.model)
    head_set = find_head_set(model.model_id)
    if head_set is None:
        parser.error(f"no head set is known for {model.model_id}.")
    heads = head_set.heads
    runs: dict[bool, list[Sample]] = {}
    device = ""
    with (
        quiet_engine(False),
        tqdm(total=2 * arguments.requests, desc="soak", unit="request") as bar,
    ):
        for captured in (True, False):
            with HookLLM(
                model.path_or_id,
                heads=heads,
                layers="auto",
                max_model_len=512,
                kv_cache_memory_bytes=64 << 20,
            ) as engine:
                device = engine.model.device
                runs[captured] = soak(engine, heads, arguments.requests, captured, bar)
    samples = runs[True]
    found = faults(samples, runs[False])
    for sample in samples:
        print(f"{sample.requests:7d} requests  {sample.resident_mib:8.1f} MiB  {sample.kept}")
    print(f"memory grew by {growth(samples):.3f}, without captures by {growth(runs[False]):.3f}")
    print("; ".join(found) or "nothing left behind")
    about = {**environment(), "device": device, "model": model.model_id, "faults": found}
    path = arguments.out or RESULTS / f"soak-{device}.json"
    about["growth"] = {"captured": growth(samples), "plain": growth(runs[False])}
    both = {
        name: [asdict(s) for s in runs[c]] for name, c in (("captured", True), ("plain", False))
    }
    text = json.dumps({**about, **both}, indent=1)
    write_whole(path, text + "\n")
    print(f"written to {path}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
