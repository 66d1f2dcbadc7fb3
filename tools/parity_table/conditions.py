"""The conditions every engine is asked to be exact under; one function each, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from prompts import NULL_QUERY, QUERIES, random_request

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head

from . import adapters, pressure, programmed
from .mixed import near_tie, ordinary_outputs_differ
from .session import NotMet, Observed, Session, as_prompt, greedy

STORIES = ("The capital of France is", "Once upon a time, a lighthouse keeper", "2, 4, 6, 8,")


def cold(session: Session) -> Observed:
    """One request, empty cache."""
    seen = Observed()
    session.cold()
    (capture,) = session.capture(seen, [session.product()])
    if capture.cached_tokens:
        raise NotMet(f"{capture.cached_tokens} tokens came from the cache")
    return seen


def repeat(session: Session) -> Observed:
    """The same request again: its query rows come from the cache."""
    seen = Observed()
    session.cold()
    request = session.product(QUERIES[3])
    session.engine.capture([request])
    for _ in range(2):
        (again,) = session.capture(seen, [request])
    if session.caches_prefixes and not (again.recomputed or again.cached_tokens):
        raise NotMet("nothing came from the cache")
    return seen


def pair(session: Session) -> Observed:
    """Query and null query in one batch, sharing the documents."""
    seen = Observed()
    session.cold()
    _, null = session.capture(seen, session.products(QUERIES[0], NULL_QUERY))
    seen.notes.append(f"the second took {null.cached_tokens} tokens from the cache")
    return seen


def warm(session: Session) -> Observed:
    """Documents cached by a capture, then a new query."""
    seen = Observed()
    session.cold()
    first, second = session.products(QUERIES[0], QUERIES[1])
    session.engine.capture([first])
    (capture,) = session.capture(seen, [second])
    if session.caches_prefixes and not (capture.cached_tokens or capture.recomputed):
        raise NotMet("nothing came from the cache")
    return seen


def mixed(session: Session) -> Observed:
    """Four captures among ordinary requests, whose tokens must be those without any capture."""
    seen = Observed()
    requests = session.products(*QUERIES[:2], NULL_QUERY) + session.products(QUERIES[2], seed=1)
    prompts: list[Any] = [*map(as_prompt, requests), *STORIES]
    nothing: list[AttentionProbe | None] = [None] * len(STORIES)
    params = greedy(24, logprobs=5, ignore_eos=True)
    session.cold()
    plain = session.engine.probe(prompts, [None] * len(prompts), params).outputs
    session.cold()
    probed = session.engine.probe(prompts, [*(r.probe for r in requests), *nothing], params)
    session.keep(seen, requests, probed.captures[: len(requests)])
    lead = near_tie(session.model, session.dtype)
    ordinary_outputs_differ(seen, plain, probed.outputs, lead)
    return seen


def head_sets(session: Session) -> Observed:
    """Twelve requests with different heads in one batch."""
    seen = Observed()
    session.cold()
    every = session.heads
    one_layer = tuple(Head(1, h) for h in range(session.engine.model.num_heads))
    sets = [every[:1], every[2:5], every[::-1], one_layer]
    requests = [
        session.product(QUERIES[i % 4], heads=sets[i % 4], seed=i, documents=4) for i in range(12)
    ]
    session.capture(seen, requests)
    return seen


def all_heads(session: Session) -> Observed:
    """Every head of every layer, beside a request for a few."""
    seen = Observed()
    session.cold()
    limit = min(session.chunk, 220)
    spans = ((4, 20), (20, limit - 30))
    few = random_request(limit, (limit - 20, limit - 4), spans, session.heads, seed=11)
    requests = [
        random_request(limit, (limit - 20, limit - 4), spans, seed=12),
        few,
        random_request(limit - 7, (limit - 20, limit - 9), spans, seed=12),
    ]
    for _ in range(2):
        session.capture(seen, requests)
    return seen


def ordinary_prefix(session: Session) -> Observed:
    """The documents were first computed by a request without a capture."""
    seen = Observed()
    session.cold()
    first, second = session.products(QUERIES[0], QUERIES[1])
    session.engine.generate([as_prompt(first)], greedy(1))
    for request in (second, first):
        session.capture(seen, [request])
    return seen


def rows_inside_the_hit(session: Session) -> Observed:
    """Query rows before the end of a prefix hit, whose blocks a sliding window's hit leaves out."""
    seen = Observed()
    session.cold()
    spans = ((4, 60), (64, 150))
    first = random_request(200, (110, 198), spans, session.heads, seed=0)
    ends = [random_request(n, (0, 1), ((0, 1),), seed=n) for n in (10, 60, 130)]
    requests = [
        CaptureRequest(first.prompt_token_ids + end.prompt_token_ids, first.probe) for end in ends
    ]
    for _ in range(2):
        captures = session.capture(seen, [*requests, requests[0]])
    again = sum(c.recomputed for c in captures)
    seen.notes.append(f"the second time, {again} of {len(captures)} were computed again")
    return seen


def sleep(session: Session) -> Observed:
    """The engine slept (weights off the GPU, cache dropped) and woke between two captures."""
    seen = Observed()
    first, second = session.products(QUERIES[0], QUERIES[1])
    session.capture(seen, [first])
    session.engine.llm.sleep(level=1)
    session.engine.llm.wake_up()
    captures: Sequence[Capture] = session.capture(seen, [first])
    seen.notes.append(f"after waking, {captures[0].cached_tokens} tokens came from the cache")
    session.capture(seen, [second])
    return seen


def short_prompts(session: Session) -> Observed:
    """A few short requests, twice: for engines too slow for more."""
    seen = Observed()
    session.cold()
    spans = ((0, 20), (24, 40))
    requests: list[CaptureRequest] = [
        random_request(n, (n - 6, n - 1), spans, session.heads, seed=n) for n in (73, 95, 45)
    ]
    for _ in range(2):
        session.capture(seen, requests)
    session.capture(seen, [random_request(45, (39, 44), spans, seed=45)])
    return seen


CONDITIONS: dict[str, Callable[[Session], Observed]] = {
    "cold": cold,
    "repeat": repeat,
    "pair": pair,
    "warm": warm,
    "mixed": mixed,
    "head-sets": head_sets,
    "all-heads": all_heads,
    "ordinary-prefix": ordinary_prefix,
    "rows-inside-the-hit": rows_inside_the_hit,
    "short": short_prompts,
    "sleep": sleep,
    "rows-across-chunks": pressure.rows_across_chunks,
    "more-rows-than-a-chunk": pressure.more_rows_than_a_chunk,
    "last-chunk-of-one-token": pressure.last_chunk_of_one_token,
    "last-query-token-alone": pressure.last_query_token_alone,
    "prefix-evicted": pressure.prefix_evicted,
    "preempted": pressure.preempted,
    "cancelled": pressure.cancelled,
    "lora": adapters.lora,
    "programs": programmed.programs,
}
