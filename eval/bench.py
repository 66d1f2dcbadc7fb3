"""The runtime's price and gains as ratios, measured in one run: ``make bench``.

Run as ``python -m core_rerank.eval.bench``; prints a table and writes a JSON file. Every ratio is
the median over repeats of which the sides alternate, with its 95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import workloads
from .bench_report import NO_GOAL, RESULTS, Report, Row, environment, print_table
from .gpu_engines import plain_llm
from .idle_hook import IN_PLACE, TAKEN_OUT, idle_hook_seconds
from .timing import Action, Comparison, compare, summarise
from .worker_side import EXTENSION

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM
    from hook_runtime.specs import Head

CACHE_BYTES = 1 << 30
BLOCK_SIZE = 32
GENERATION_FACTOR = 4
"""Generation is compared this many times as often: its goal is below the noise of one run."""
GENERATION_TOKENS = 12


class Bench:
    """Holds the engines and counts the runs for the progress bar."""

    def __init__(self, model: str, heads: Sequence[Head], repeats: int, bar: Any) -> None:
        self.path = model
        self.heads = tuple(heads)
        self.repeats = repeats
        self.bar = bar
        self.device: dict[str, str] = {}
        self.arguments: dict[str, Any] = {
            "max_model_len": 2048,
            "kv_cache_memory_bytes": CACHE_BYTES,
            "block_size": BLOCK_SIZE,
            "worker_extension_cls": EXTENSION,
        }

    def run(self) -> list[Row]:
        """All claims, one after the other; at most three engines at a time."""
        from hook_runtime.engine import HookLLM

        with HookLLM(self.path, heads=self.heads, **self.arguments) as full:
            self.device = {"device": full.model.device, "dtype": full.model.dtype}
            rows = self.captures(full)
            with contextlib.ExitStack() as stack:
                plain = stack.enter_context(plain_llm(self.path, **self.arguments))
                other = stack.enter_context(plain_llm(self.path, **self.arguments))
                rows += self.generation(full, plain, other)
            arguments = {**self.arguments, "layers": "auto"}
            with HookLLM(self.path, heads=self.heads, **arguments) as short:
                rows.append(self.early_exit(full, short))
                rows.append(self.warm_prefix(short))
        return rows

    def captures(self, engine: HookLLM) -> list[Row]:
        """Captured against plain prefill of the same prompts, every run from an empty cache."""
        rows = []
        for prompts, documents, words in ((2, 8, 105), (12, 1, 150)):
            requests = workloads.requests(engine.tokenizer, self.heads, prompts, documents, words)
            ids = [list(request.prompt_token_ids) for request in requests]
            result = self._compare(
                lambda _, ids=ids: _prefill(engine, ids),
                lambda _, requests=requests: engine.capture(requests),
                before=lambda _: engine.llm.reset_prefix_cache(),
            )
            tokens = round(sum(map(len, ids)) / prompts)
            claim = f"captured / plain: {prompts} prompts of {tokens} tokens"
            rows.append(Row(claim, result, "at most 1.03", 0.0, 1.03))
        return rows

    def generation(self, hooked: HookLLM, plain: Any, other: Any) -> list[Row]:
        """The same ordinary requests with and without the hook.

        A second engine without a hook shows what two equal engines differ by.
        """
        from vllm import SamplingParams

        prompts = [workloads.document(40, seed) for seed in range(8)]
        params = SamplingParams(max_tokens=GENERATION_TOKENS, temperature=0.0, ignore_eos=True)
        seconds = idle_hook_seconds(
            hooked,
            {"unhooked": plain, "second unhooked": other},
            prompts,
            params,
            GENERATION_FACTOR * self.repeats,
            lambda: self.bar.update(1),
        )
        goal = ("at most 1.01", 0.0, 1.01)
        free = (NO_GOAL, 0.0, float("inf"))
        return [
            Row(f"ordinary requests, {claim}", summarise(seconds[a], seconds[b]), *range_)
            for claim, a, b, range_ in (
                ("one engine: idle hook / hook taken out", TAKEN_OUT, IN_PLACE, goal),
                ("two engines: hooked / unhooked", "unhooked", IN_PLACE, free),
                ("two engines: hook taken out / unhooked", "unhooked", TAKEN_OUT, free),
                ("two engines: both unhooked (control)", "unhooked", "second unhooked", free),
            )
        ]

    def early_exit(self, full: HookLLM, short: HookLLM) -> Row:
        """Time of the kept layers against all layers, over the ratio of their numbers."""
        requests = workloads.requests(full.tokenizer, self.heads, 2, 8, 105)

        def reset(_: int) -> None:
            full.llm.reset_prefix_cache()
            short.llm.reset_prefix_cache()

        result = self._compare(
            lambda _: full.capture(requests), lambda _: short.capture(requests), before=reset
        )
        kept, total = short.model.layers_kept, short.model.num_layers
        claim = f"early exit: time ratio / layer ratio ({kept} of {total} layers)"
        return Row(claim, result.times(total / kept), "0.90 to 1.10", 0.9, 1.1)

    def warm_prefix(self, engine: HookLLM) -> Row:
        """Documents one by one: unseen ones, then the same with another query."""
        from core_rerank.reranker import Reranker

        reranker = Reranker(backend=engine, heads=self.heads, window=1)
        count, words = 20, 200

        def rerank(repeat: int, query: str) -> None:
            seeds = range(10_000 * (repeat + 2), 10_000 * (repeat + 2) + count)
            reranker.rerank(query, [workloads.document(words, seed) for seed in seeds])

        result = self._compare(
            lambda repeat: rerank(repeat, workloads.QUERIES[0]),
            lambda repeat: rerank(repeat, workloads.QUERIES[1]),
            alternate=False,
        ).inverse()
        claim = f"pointwise, {count} documents of {words} words: cold / warm with a new query"
        return Row(claim, result, "at least 4", 4.0, float("inf"))

    def _compare(self, a: Action, b: Action, **how: Any) -> Comparison:
        return compare(a, b, self.repeats, after_each=lambda: self.bar.update(1), **how)


def runs(repeats: int) -> int:
    """How many runs `Bench.run` makes: the length of its progress bar."""
    return 2 * 4 * (repeats + 1) + 4 * (GENERATION_FACTOR * repeats + 1)


def _prefill(engine: HookLLM, prompts: Sequence[Sequence[int]]) -> None:
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    engine.generate(
        [{"prompt_token_ids": list(ids), "cache_salt": "plain"} for ids in prompts], one
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: measure, print, write; 1 if a goal was clearly missed."""
    parser = argparse.ArgumentParser(prog="python -m core_rerank.eval.bench")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--heads", nargs="+", help="such as 15-7; by default the model's head set")
    parser.add_argument("--repeats", type=int, default=7, help="of every comparison, at least 7")
    parser.add_argument("--out", type=Path, help="by default eval/results/bench-DEVICE.json")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    arguments = parser.parse_args(argv)
    if arguments.repeats < 7:
        parser.error(
            f"--repeats must be at least 7 for a median to mean something, not {arguments.repeats}"
        )
    from tqdm import tqdm

    from core_rerank.commands.terminal import quiet_engine
    from core_rerank.models import resolve_model

    with quiet_engine(arguments.verbose):
        model = resolve_model(arguments.model)
        heads = _heads(arguments.heads, model.model_id)
        with tqdm(total=runs(arguments.repeats), desc="bench", unit="run") as bar:
            bench = Bench(model.path_or_id, heads, arguments.repeats, bar)
            rows = bench.run()
    about = {
        **environment(),
        **bench.device,
        "model": model.model_id,
        "revision": model.revision,
        "heads": [str(head) for head in heads],
    }
    path = arguments.out or RESULTS / f"bench-{bench.device['device']}.json"
    report = Report(about, path, rows)
    print_table(report, "core-rerank bench")
    report.save()
    print(f"written to {path}")
    return int(any(row.verdict == "missed" for row in rows))


def _heads(given: Sequence[str] | None, model_id: str) -> tuple[Head, ...]:
    from core_rerank.heads import find_head_set
    from hook_runtime.specs import Head

    if given:
        return tuple(Head.parse(name) for name in given)
    head_set = find_head_set(model_id)
    if head_set is None:
        raise SystemExit(f"no head set is known for {model_id}: give --heads, such as 15-7 10-4.")
    return head_set.heads


if __name__ == "__main__":
    sys.exit(main())
