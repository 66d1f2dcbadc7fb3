"""What the scheduler may do to a capture: chunks, eviction, preemption, cancellation."""

from __future__ import annotations

from typing import Any

from prompts import NULL_QUERY, QUERIES, random_request

from hook_runtime.errors import IncompleteCaptureError
from hook_runtime.specs import AttentionProbe, CaptureRequest

from .session import NotMet, Observed, Session, as_prompt, greedy


def rows_across_chunks(session: Session) -> Observed:
    """Query rows on both sides of a chunk's end, cold and repeated."""
    seen = Observed()
    session.cold()
    for _ in range(2):
        session.capture(seen, [_straddling(session)])
    return seen


def _straddling(session: Session) -> CaptureRequest:
    for seed in range(50):
        request = session.product(QUERIES[3], seed=seed, documents=5)
        start, end = request.probe.query_span
        if start // session.chunk < (end - 1) // session.chunk:
            return request
    raise NotMet(f"no prompt straddles a chunk of {session.chunk} tokens")


def more_rows_than_a_chunk(session: Session) -> Observed:
    """More query rows than one chunk holds."""
    seen = Observed()
    if session.chunk >= 220:
        raise NotMet(f"a chunk holds {session.chunk} tokens")
    request = random_request(300, (70, 290), ((0, 30), (30, 69)), session.heads, seed=3)
    for _ in range(2):
        session.capture(seen, [request])
    return seen


def last_chunk_of_one_token(session: Session) -> Observed:
    """The last chunk looks like a decode step; with the query before it, and in it."""
    seen = Observed()
    session.cold()
    length = 3 * session.chunk + 1
    spans = ((0, 90), (90, 180))
    for rows, seed in (((length - 30, length - 3), 4), ((length - 1, length), 5)):
        request = random_request(length, rows, spans, session.heads, seed=seed)
        for _ in range(2):
            session.capture(seen, [request])
    return seen


def last_query_token_alone(session: Session) -> Observed:
    """A document set whose last query token falls alone into a chunk."""
    seen = Observed()
    session.cold()
    full = session.product(QUERIES[1])
    start, end = full.probe.query_span
    cut = (end - 1) % session.chunk
    spans = [(max(a - cut, 0), b - cut) for a, b in full.probe.spans if b - cut > 0]
    probe = AttentionProbe(session.heads, (start - cut, end - cut), tuple(spans))
    request = CaptureRequest(full.prompt_token_ids[cut:end], probe)
    for _ in range(2):
        session.capture(seen, [request])
    return seen


def prefix_evicted(session: Session) -> Observed:
    """The captured documents fell out of a small cache before the next query came."""
    seen = Observed()
    session.cold()
    first, second = session.products(QUERIES[0], QUERIES[1], documents=6)
    session.capture(seen, [first])
    (kept,) = session.capture(seen, [second])
    blocks = int(session.config.cache_config.num_gpu_blocks)
    tokens = blocks * int(session.config.cache_config.block_size)
    for seed in range(2 * tokens // 300 + 1):
        filler = random_request(300, (290, 299), ((0, 20),), session.heads, seed=100 + seed)
        session.engine.generate([as_prompt(filler)], greedy(1))
    (again,) = session.capture(seen, [second])
    if again.cached_tokens or not kept.cached_tokens:
        raise NotMet(
            f"cached tokens before and after the cache was filled: {kept.cached_tokens} and "
            f"{again.cached_tokens}"
        )
    session.capture(seen, [first])
    return seen


def preempted(session: Session) -> Observed:
    """Too few cache blocks for what runs at once: requests are thrown out and start again."""
    seen = Observed()
    session.cold()
    requests = [session.product(QUERIES[i % 4], seed=i, documents=6) for i in range(6)]
    long = greedy(40, ignore_eos=True)
    before = _preemptions(session)
    probed = session.engine.probe(
        [as_prompt(r) for r in requests], [r.probe for r in requests], long
    )
    times = _preemptions(session) - before
    if not times:
        raise NotMet("no request was preempted")
    session.keep(seen, requests, probed.captures)
    seen.notes.append(f"{times:.0f} preemptions")
    return seen


def _preemptions(session: Session) -> float:
    metrics = session.engine.llm.get_metrics()
    return sum(m.value for m in metrics if m.name == "vllm:num_preemptions")


def cancelled(session: Session) -> Observed:
    """Aborted before, during and after prefill; then exact captures and nothing left behind."""
    seen = Observed()
    requests = session.products(*QUERIES[:3], NULL_QUERY, seed=8, documents=4)
    prompts = [as_prompt(r) for r in requests]
    probes = [r.probe for r in requests]
    for stage in (0, 1, 5, 24):
        session.cold()
        with _AbortAtStep(session.engine.llm.llm_engine, stage) as abort:
            try:
                session.engine.probe(prompts, probes, greedy(24, ignore_eos=True))
            except IncompleteCaptureError:
                pass
            else:
                seen.problems.append(f"no error although requests were aborted at step {stage}")
        if not abort.done:
            raise NotMet(f"the batch ended before step {stage}")
    session.capture(seen, requests)
    session.capture(seen, session.products(QUERIES[0], NULL_QUERY, seed=9))
    if session.engine.llm.llm_engine.get_num_unfinished_requests():
        seen.problems.append("vLLM still runs requests that were cancelled")
    for rank, kept in enumerate(session.engine.stats()):
        left = {name: kept[name] for name in ("requests", "results", "wrapped_layers")}
        if any(left.values()):
            seen.problems.append(f"worker {rank} keeps {left} of cancelled requests")
    return seen


class _AbortAtStep:
    """While it lasts, all running requests but the last are aborted before the n-th step.

    Not all of them: an engine in its own process would be waited for without end.
    """

    def __init__(self, engine: Any, step: int) -> None:
        self.engine, self.at, self.done = engine, step, False

    def __enter__(self) -> _AbortAtStep:
        original, count = self.engine.step, 0

        def step() -> Any:
            nonlocal count
            if count == self.at:
                running = list(self.engine.output_processor.request_states)[:-1]
                self.engine.abort_request(running, internal=True)
                self.done = True
            count += 1
            return original()

        self.engine.step = step
        return self

    def __exit__(self, *_: object) -> None:
        del self.engine.step
