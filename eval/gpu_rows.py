"""The rows of a GPU benchmark, each measured on engines that are running already."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from . import workloads
from .bench_report import NO_GOAL, Figure, Row
from .gpu_engines import computed_spans, plain_prompt, prefill
from .idle_hook import IN_PLACE, TAKEN_OUT, idle_hook_seconds
from .shapes import work
from .timing import Action, Comparison, compare, interleave, summarise

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM
    from hook_runtime.specs import Head

    from .rivals import Ranker, RankerResult

GENERATION_FACTOR = 3
"""Generation is compared this many times as often: its goal is below the noise of one run."""
CEILING_REPEATS = 20
AT_LEAST_99 = ("at least 0.99", 0.99, float("inf"))
AT_LEAST_995 = ("at least 0.995", 0.995, float("inf"))


@dataclass(frozen=True, slots=True)
class Load:
    """How much work a run is; the defaults are the record's.

    Attributes:
        queries, documents, tokens: reranks, documents of each, tokens of a document.
        sequences, new_tokens: ordinary requests, and what each of them generates.
        repeats: of every comparison.
    """

    queries: int = 8
    documents: int = 40
    tokens: int = 120
    sequences: int = 32
    new_tokens: int = 64
    repeats: int = 6

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """An option of a command for each attribute."""
        for field in fields(cls):
            name = f"--{field.name.replace('_', '-')}"
            parser.add_argument(name, type=int, default=field.default)

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Load:
        """What those options say."""
        return cls(**{field.name: getattr(arguments, field.name) for field in fields(cls)})

    def pairs(self, tokenizer: Any, heads: tuple[Head, ...], seed: int = 0) -> list[workloads.Pair]:
        """The queries' prompts, of random tokens."""
        vocabulary = range(100, len(tokenizer) - 100)
        return workloads.pairs(
            vocabulary, heads, self.queries, self.documents, self.tokens, seed=seed
        )

    def texts(self, tokenizer: Any, number: int) -> list[str]:
        """One query's documents as texts; every ``number`` has its own."""
        seeds = range(10_000 * (number + 1), 10_000 * (number + 1) + self.documents)
        return [workloads.text(tokenizer, self.tokens, seed) for seed in seeds]

    def ordinary(self, tokenizer: Any) -> tuple[list[dict[str, Any]], Any]:
        """Ordinary requests' prompts and sampling parameters."""
        from vllm import SamplingParams

        vocabulary = range(100, len(tokenizer) - 100)
        prompts = [
            {"prompt_token_ids": workloads.token_ids(vocabulary, 64, seed)}
            for seed in range(self.sequences)
        ]
        params = SamplingParams(max_tokens=self.new_tokens, temperature=0.0, ignore_eos=True)
        return prompts, params


Tick = Callable[[], object]
Awaited = Callable[[list[Any]], Awaitable[object]]


def captured_against_plain(
    hooked: HookLLM, plain: Any | None, load: Load, heads: tuple[Head, ...], tick: Tick
) -> list[Row]:
    """Queries per second with captures over those without, in one call and one query at a time.

    "Without" is an ordinary prefill of the same prompts: on the same engine, and on ``plain``,
    an unhooked one of as many layers. Where the runtime leaves out parts of the last layer, only
    the latter computes all of them.
    """
    pairs = load.pairs(hooked.tokenizer, heads)
    together = [[request for pair in pairs for request in pair]]
    layers = hooked.model.layers_kept
    rows = []
    for how, batches in (("in one call", together), ("one at a time", pairs)):
        actions: dict[str, Action] = {
            "captured": _each(hooked.capture, batches),
            "same engine": _each(lambda batch: prefill(hooked.llm, batch), batches),
        }
        if plain is not None:
            actions["unhooked engine"] = _each(lambda batch: prefill(plain, batch), batches)

        def reset(name: str, _: int) -> None:
            (plain if name == "unhooked engine" else hooked.llm).reset_prefix_cache()  # type: ignore[union-attr]

        seconds = interleave(actions, load.repeats, before=reset, after_each=tick)
        for name in list(actions)[1:]:
            claim = f"captured / plain on the {name}, {layers} layers, {load.queries} queries {how}"
            comparison = summarise(seconds["captured"], seconds[name])
            rows.append(Row(claim, comparison, *AT_LEAST_99, load.queries, "queries"))
    return rows


def _each(run: Callable[[Any], object], batches: Sequence[Any]) -> Action:
    def action(_: int) -> None:
        for batch in batches:
            run(list(batch))

    return action


def generation(hooked: HookLLM, plain: Any, load: Load, tick: Tick) -> list[Row]:
    """Ordinary decoding: an idle hook in place and taken out of one engine; two engines."""
    prompts, params = load.ordinary(hooked.tokenizer)
    repeats = GENERATION_FACTOR * load.repeats
    seconds = idle_hook_seconds(hooked, {"unhooked": plain}, prompts, params, repeats, tick)
    tokens = load.sequences * load.new_tokens
    what = f"generation, {load.sequences} sequences of {load.new_tokens} tokens"
    return [
        Row(
            f"{what}, {claim}",
            summarise(seconds[IN_PLACE], seconds[other]),
            *AT_LEAST_995,
            tokens,
            "tokens",
        )
        for claim, other in (
            ("idle hook in place / taken out of the same engine", TAKEN_OUT),
            ("hooked / unhooked engine", "unhooked"),
        )
    ]


def mixed(hooked: HookLLM, load: Load, heads: tuple[Head, ...], tick: Tick) -> list[Row]:
    """Ordinary requests while others capture, against the others as ordinary prefills."""
    ordinary, params = load.ordinary(hooked.tokenizer)
    pairs = load.pairs(hooked.tokenizer, heads)[: max(1, load.queries // 2)]
    requests = [request for pair in pairs for request in pair]
    prompts = [*map(plain_prompt, requests), *ordinary]
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    all_params = [*[one] * len(requests), *[params] * len(ordinary)]
    probed = [*(list(r.prompt_token_ids) for r in requests), *ordinary]
    probes = [*(r.probe for r in requests), *[None] * len(ordinary)]
    comparison = compare(
        lambda _: hooked.probe(probed, probes, all_params),
        lambda _: hooked.llm.generate(prompts, all_params, use_tqdm=False),
        load.repeats,
        before=lambda _: hooked.llm.reset_prefix_cache(),
        after_each=tick,
    )
    claim = f"generation beside {len(requests)} captures / beside the same prompts uncaptured"
    tokens = load.sequences * load.new_tokens
    return [Row(claim, comparison, *AT_LEAST_995, tokens, "tokens")]


def warm(hooked: HookLLM, load: Load, heads: tuple[Head, ...], tick: Tick) -> list[Row]:
    """Pointwise: a query over unseen documents, then another query over the same ones."""
    from core_rerank.reranker import Reranker

    reranker = Reranker(backend=hooked, heads=heads, window=1)
    repeats = 2 * load.repeats
    texts = [load.texts(hooked.tokenizer, number) for number in range(repeats + 1)]

    def rerank(query: str) -> Action:
        return lambda repeat: reranker.rerank(query, texts[repeat + 1])

    comparison = compare(
        rerank(workloads.QUERIES[1]),
        rerank(workloads.QUERIES[0]),
        repeats,
        after_each=tick,
        alternate=False,
    ).inverse()
    claim = f"pointwise, {load.documents} documents of {load.tokens} tokens, new query: warm / cold"
    goal = ("at least 8", 8.0, float("inf"))
    return [Row(claim, comparison, *goal, load.documents, "documents")]


def floor(
    hooked: HookLLM, config: Any, load: Load, heads: tuple[Head, ...], size: int
) -> list[Figure]:
    """The most queries per second that the matrix units allow here, by the model's arithmetic."""
    (seconds, *_) = hooked.llm.collective_rpc("bench_matmul", args=(size, CEILING_REPEATS))
    ceiling = 2.0 * size**3 / seconds
    pairs = load.pairs(hooked.tokenizer, heads)
    block = hooked.llm.llm_engine.vllm_config.cache_config.block_size
    layers = hooked.model.layers_kept
    spent = work(config, layers, computed_spans(pairs[:1], block))
    kind = hooked.model.dtype
    return [
        Figure("matrix-unit ceiling", ceiling / 1e12, "TFLOP/s", f"{size}^3 product in {kind}"),
        Figure(
            f"arithmetic floor, {layers} layers: weights alone",
            ceiling / spent.weights,
            "queries/s",
            f"ceiling / {spent.weights / 1e12:.4g} TFLOP a query",
        ),
        Figure(
            f"arithmetic floor, {layers} layers: with attention",
            ceiling / spent.total,
            "queries/s",
            f"ceiling / {spent.total / 1e12:.4g} TFLOP a query",
        ),
    ]


def floor_share(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Figure]:
    """The share of the floor (with attention) that captured and plain queries reach."""
    top = next(f.value for f in figures if f.name.endswith("with attention"))
    shares = {}
    for row in rows:
        assert row.speeds is not None
        captured, plain = (100 * speed / top for speed in row.speeds)
        where, what = row.claim.removeprefix("captured / plain ").split(", ", 1)
        shares[f"captured, {what}"] = captured
        shares[f"plain {where}, {what}"] = plain
    return [Figure(f"of the floor: {name}", share, "%") for name, share in shares.items()]


def memory(hooked: HookLLM) -> list[Figure]:
    """The shadow against the KV cache, and the peak of the GPU's memory."""
    layers = hooked.model.layers_kept
    share = 100 * hooked.shadow_bytes / hooked.kv_bytes
    mib = hooked.shadow_bytes / 2**20
    found = [Figure(f"shadow / KV cache, {layers} layers", share, "%", f"shadow of {mib:.4g} MiB")]
    for rank, peak in enumerate(hooked.llm.collective_rpc("bench_memory")):
        for name, size in peak.items():
            what = f"GPU memory {name}, {layers} layers, worker {rank}"
            found.append(Figure(what, size / 2**30, "GiB"))
    return found


def sweep_step(
    hooked: HookLLM, tokens: int, load: Load, heads: tuple[Head, ...], tick: Tick
) -> list[Row]:
    """One value of max_num_batched_tokens: captured against plain on the same engine."""
    requests = [request for pair in load.pairs(hooked.tokenizer, heads) for request in pair]
    comparison = compare(
        lambda _: hooked.capture(requests),
        lambda _: prefill(hooked.llm, requests),
        load.repeats,
        before=lambda _: hooked.llm.reset_prefix_cache(),
        after_each=tick,
    )
    layers = hooked.model.layers_kept
    claim = f"max_num_batched_tokens={tokens}, {layers} layers: captured / plain"
    return [Row(claim, comparison, NO_GOAL, 0.0, float("inf"), load.queries, "queries")]


def profiled(hooked: HookLLM, load: Load, heads: tuple[Head, ...]) -> str:
    """Torch's profile of one captured batch, of every worker, as text."""
    requests = [request for pair in load.pairs(hooked.tokenizer, heads) for request in pair]
    hooked.capture(requests)
    hooked.llm.reset_prefix_cache()
    hooked.llm.collective_rpc("bench_profile", args=(True,))
    hooked.capture(requests)
    return "\n\n".join(hooked.llm.collective_rpc("bench_profile", args=(False,)))


async def _in_turn(
    a: Awaited, b: Awaited, pairs: Callable[[], list[workloads.Pair]], repeats: int, tick: Tick
) -> tuple[Comparison, int]:
    """``timing.compare`` of what is awaited, with new prompts each time; and queries of a run."""
    seconds: tuple[list[float], list[float]] = ([], [])
    sides, queries = (a, b), 0
    loop = asyncio.get_running_loop()
    for repeat in range(-1, repeats):
        for side in (0, 1) if repeat % 2 else (1, 0):
            made = pairs()
            queries = len(made)
            requests = [request for pair in made for request in pair]
            start = loop.time()
            await sides[side](requests)
            taken = loop.time() - start
            if repeat >= 0:
                seconds[side].append(taken)
            tick()
    return summarise(*seconds), queries


async def data_parallel(
    several: Any,
    gpus: int,
    pairs: Callable[[], list[workloads.Pair]],
    repeats: int,
    tick: Tick,
) -> Row:
    """Throughput of all GPUs of ``several`` over ``gpus`` times that of its first one.

    ``several`` is an AsyncHookLLM; ``pairs`` gives new prompts at every call, so that no
    prefix cache holds them.
    """

    async def on_all(requests: list[Any]) -> None:
        several.use_engines(gpus)
        await several.capture(requests)

    async def on_one(requests: list[Any]) -> None:
        several.use_engines(1)
        await several.capture(requests)

    comparison, queries = await _in_turn(on_all, on_one, pairs, repeats, tick)
    comparison = comparison.times(1 / gpus)
    claim = f"data parallel: {queries} queries on {gpus} GPUs / {gpus} x one GPU"
    return Row(claim, comparison, "at least 0.95", 0.95, float("inf"), queries, "queries")


async def captured_beside_plain(
    several: Any,
    gpus: int,
    pairs: Callable[[], list[workloads.Pair]],
    repeats: int,
    tick: Tick,
) -> Row:
    """Captures on all engines of an AsyncHookLLM over ordinary prefills of such prompts there.

    ``pairs`` gives new prompts at every call, so that no prefix cache holds them.
    """
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    names = map("plain-{}".format, itertools.count())

    async def plain(requests: list[Any]) -> None:
        async def prefilled(number: int, request: Any) -> None:
            # vLLM's own engine: a hooked one whose layers are cut refuses to generate. A query
            # and its null pass go to one of them, as captures do, to share the documents.
            rank = {"data_parallel_rank": number // 2 % gpus} if gpus > 1 else {}
            prompt = plain_prompt(request)
            async for _ in several.engine.generate(prompt, one, next(names), **rank):
                pass

        await asyncio.gather(*itertools.starmap(prefilled, enumerate(requests)))

    comparison, queries = await _in_turn(several.capture, plain, pairs, repeats, tick)
    claim = f"captured / plain, {queries} queries on {gpus} GPUs by data parallel"
    return Row(claim, comparison, *AT_LEAST_99, queries, "queries")


def seconds_per_query(
    rival: Ranker, core: Ranker, load: Load, texts: Sequence[list[str]], tick: Tick
) -> list[Row | Figure]:
    """A rival's time per query over core-rerank's, for the same queries and documents.

    ``texts`` holds the documents of each repeat, the warm-up's first: unseen ones every time.
    """
    results: dict[str, list[RankerResult]] = {"core": [], "rival": []}
    query = workloads.QUERIES[0]

    def rank(name: str, ranker: Ranker) -> Action:
        return lambda repeat: results[name].append(ranker.rank(query, texts[repeat + 1]))

    comparison = compare(rank("core", core), rank("rival", rival), load.repeats, after_each=tick)
    claim = f"time per query of {load.documents} documents: {rival.name} / {core.name}"
    found: list[Row | Figure] = [Row(claim, comparison, NO_GOAL, 0.0, float("inf"))]
    for name, ranker in (("core", core), ("rival", rival)):
        taken = results[name][1:]
        note = (
            f"{statistics.median(r.input_tokens for r in taken):.0f} tokens in, "
            f"{statistics.median(r.output_tokens for r in taken):.0f} out, "
            f"answers mended: {sum(r.failures for r in taken)}"
        )
        seconds = statistics.median(r.seconds for r in taken)
        beside = rival.name if name == "core" else core.name
        found.append(Figure(f"{ranker.name}, a query (beside {beside})", seconds, "s", note))
    return found
