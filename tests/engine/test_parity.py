"""Captures of SmolLM2 in a default (compiled) engine against transformers eager, in float32."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parity import assert_exact
from prompts import HEADS, NULL_QUERY, QUERIES, capture_request

from hook_runtime.engine import HookLLM
from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head

pytestmark = pytest.mark.engine

Reference = Callable[[Any], list[np.ndarray]]
STORIES = ("The capital of France is", "Once upon a time, a lighthouse keeper", "2, 4, 6, 8,")


def _greedy(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0.0)


def _requests(engine: HookLLM, *queries: str, **how: Any) -> list[CaptureRequest]:
    return [capture_request(engine.tokenizer, query, **how) for query in queries]


def _check(engine: HookLLM, reference: Reference, requests: list[CaptureRequest]) -> list[Capture]:
    captures = engine.capture(requests)
    assert_exact(captures, reference(requests), requests)
    return captures


def test_cold(cold_engine: HookLLM, reference: Reference) -> None:
    (capture,) = _check(cold_engine, reference, _requests(cold_engine, QUERIES[0]))
    assert capture.cached_tokens == 0
    assert not capture.recomputed


def test_warm_prefix_with_a_new_query(cold_engine: HookLLM, reference: Reference) -> None:
    first, second = _requests(cold_engine, QUERIES[0], QUERIES[1])
    _check(cold_engine, reference, [first])
    (capture,) = _check(cold_engine, reference, [second])
    documents_end = second.probe.spans[-1][1]
    assert documents_end - 32 <= capture.cached_tokens < second.probe.query_span[0]
    assert not capture.recomputed


def test_whole_prompt_repeated(cold_engine: HookLLM, reference: Reference) -> None:
    requests = _requests(cold_engine, QUERIES[3])
    (first,) = _check(cold_engine, reference, requests)
    (again,) = _check(cold_engine, reference, requests)
    assert again.cached_tokens >= len(requests[0].prompt_token_ids) - 33
    assert not again.recomputed
    # The query rows were not computed this time: they come from what the first call kept.
    assert again.cached_tokens > requests[0].probe.query_span[0]
    np.testing.assert_allclose(again.values, first.values, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("extra", range(3))
def test_whole_prompt_repeated_around_a_block_boundary(
    cold_engine: HookLLM, reference: Reference, extra: int
) -> None:
    request = _requests(cold_engine, QUERIES[2])[0]
    length = len(request.prompt_token_ids) // 32 * 32 - 1 + extra  # ends before, at, after a block
    cut = CaptureRequest(
        request.prompt_token_ids[:length],
        AttentionProbe(HEADS, (length - 9, length), request.probe.spans[:-1]),
    )
    _check(cold_engine, reference, [cut])
    _check(cold_engine, reference, [cut])


def test_query_and_null_query_in_one_batch_share_the_documents(
    cold_engine: HookLLM, reference: Reference
) -> None:
    requests = _requests(cold_engine, QUERIES[0], NULL_QUERY)
    captures = _check(cold_engine, reference, requests)
    assert captures[1].cached_tokens > 0


def test_documents_first_computed_by_an_ordinary_request(
    cold_engine: HookLLM, reference: Reference
) -> None:
    first, second = _requests(cold_engine, QUERIES[0], QUERIES[1])
    cold_engine.generate([{"prompt_token_ids": list(first.prompt_token_ids)}], _greedy(1))
    _check(cold_engine, reference, [second])
    _check(cold_engine, reference, [first])


def test_batch_mixed_with_generation(cold_engine: HookLLM, reference: Reference) -> None:
    alone = [cold_engine.generate([s], _greedy(24))[0].outputs[0].token_ids for s in STORIES]
    requests = _requests(cold_engine, *QUERIES[:3], NULL_QUERY)
    requests += _requests(cold_engine, QUERIES[3], seed=1)
    prompts: list[Any] = []
    probes: list[AttentionProbe | None] = []
    for index, request in enumerate(requests):
        prompts.append({"prompt_token_ids": list(request.prompt_token_ids)})
        probes.append(request.probe)
        if index < len(STORIES):
            prompts.append(STORIES[index])
            probes.append(None)
    probed = cold_engine.probe(prompts, probes, _greedy(24))
    captured = [c for c in probed.captures if c is not None]
    assert_exact(captured, reference(requests), requests)
    ordinary = [i for i, probe in enumerate(probes) if probe is None]
    assert [probed.captures[i] for i in ordinary] == [None] * len(STORIES)
    assert [probed.outputs[i].outputs[0].token_ids for i in ordinary] == alone


def test_a_probed_request_generates_as_it_would_alone(
    cold_engine: HookLLM, reference: Reference
) -> None:
    request = _requests(cold_engine, QUERIES[0])[0]
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    alone = cold_engine.generate([prompt], _greedy(16))[0].outputs[0].token_ids
    probed = cold_engine.probe([prompt], [request.probe], _greedy(16))
    assert probed.outputs[0].outputs[0].token_ids == alone
    assert_exact(probed.captures, reference([request]), [request])


def test_different_heads_in_one_batch_in_request_order(
    cold_engine: HookLLM, reference: Reference
) -> None:
    """Nine query heads share three key heads; more than ten requests, so that ids sort wrongly."""
    lists = [HEADS[:1], HEADS[2:5], HEADS[::-1], tuple(Head(10, h) for h in range(9))]
    requests = [
        capture_request(cold_engine.tokenizer, QUERIES[i % 4], lists[i % 4], seed=i, documents=4)
        for i in range(12)
    ]
    captures = _check(cold_engine, reference, requests)
    for capture, request in zip(captures, requests, strict=True):
        assert capture.values.shape == (len(request.probe.heads), request.probe.num_columns)


@pytest.mark.parametrize("warm", [False, True])
def test_reduction_to_documents(cold_engine: HookLLM, reference: Reference, warm: bool) -> None:
    by_token, by_document = (
        _requests(cold_engine, QUERIES[1], reduction=reduction)[0]
        for reduction in ("tokens", "documents")
    )
    if warm:
        cold_engine.capture([by_token])
    (capture,) = _check(cold_engine, reference, [by_document])
    assert capture.values.shape == (len(HEADS), len(by_document.probe.spans))


def test_all_heads(cold_engine: HookLLM, reference: Reference) -> None:
    requests = [
        CaptureRequest(
            r.prompt_token_ids, AttentionProbe("all", r.probe.query_span, r.probe.spans, reduction)
        )
        for r, reduction in zip(
            _requests(cold_engine, *QUERIES[:3], documents=4),
            ("tokens", "documents", "tokens"),
            strict=True,
        )
    ]
    captures = _check(cold_engine, reference, requests)
    assert captures[0].heads == tuple(Head(i, h) for i in range(30) for h in range(9))
    # Beside chosen heads, and again when everything has been seen before.
    mixed = [requests[0], *_requests(cold_engine, QUERIES[0], documents=4), requests[2]]
    _check(cold_engine, reference, mixed)
    _check(cold_engine, reference, mixed)


def test_heads_asked_for_later(cold_engine: HookLLM, reference: Reference, new_head: Head) -> None:
    _check(cold_engine, reference, _requests(cold_engine, QUERIES[0]))
    _check(cold_engine, reference, _requests(cold_engine, QUERIES[0], heads=(new_head,)))
    _check(cold_engine, reference, _requests(cold_engine, QUERIES[0]))


def test_rows_and_columns_anywhere(cold_engine: HookLLM, reference: Reference) -> None:
    """Rows in the middle, columns among and after them, a one-token row, a one-token prompt."""
    ids = _requests(cold_engine, QUERIES[0])[0].prompt_token_ids
    shapes: list[tuple[int, tuple[int, int], tuple[tuple[int, int], ...]]] = [
        (len(ids), (60, 110), ((0, 1), (50, 80), (100, 130))),
        (len(ids), (0, 40), ((0, 40),)),
        (len(ids), (90, 91), ((3, 91),)),
        (33, (32, 33), ((0, 33),)),
        (1, (0, 1), ((0, 1),)),
    ]
    requests = [
        CaptureRequest(ids[:length], AttentionProbe(HEADS, rows, spans))
        for length, rows, spans in shapes
    ]
    _check(cold_engine, reference, requests)
    _check(cold_engine, reference, requests)


def test_threads_get_their_own(cold_engine: HookLLM, reference: Reference) -> None:
    jobs = [_requests(cold_engine, QUERIES[i], heads=HEADS[i : i + 2]) for i in range(3)]
    expected = [reference(job) for job in jobs]
    got: dict[int, list[Capture]] = {}

    def work(index: int) -> None:
        for _ in range(3):
            got[index] = cold_engine.capture(jobs[index])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, job in enumerate(jobs):
        assert_exact(got[index], expected[index], job)


def test_no_requests(engine: HookLLM) -> None:
    assert engine.capture([]) == []
