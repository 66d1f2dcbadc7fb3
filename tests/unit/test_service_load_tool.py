"""The load and soak tool, on a service without a model."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from services import behind_socket, fake_reranker

from core_rerank.eval import service_load
from core_rerank.eval.service_load import LoadRow, load, load_table, make_body, soak


def test_a_soak_accounts_for_every_request(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=0.05)
    with behind_socket(reranker) as running:
        result = asyncio.run(soak(running.url, os.getpid(), 300))
    assert result.equal + result.cancelled == 300
    assert result.different == result.lost == result.refused == 0
    assert 0 < result.cancelled < 60
    assert (result.left_running, result.left_waiting) == (0, 0)
    assert len(result.resident_mib) == 10
    assert all(size > 50 for size in result.resident_mib)
    assert backend.cancelled > 0


def test_a_soak_sees_answers_that_differ(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer)
    whole, asked = backend._capture, 0

    def sometimes_wrong(request: Any) -> Any:
        nonlocal asked
        asked += 1
        capture = whole(request)
        if asked > 500 and asked % 7 == 0:
            capture.values[:] = 9
        return capture

    backend._capture = sometimes_wrong  # type: ignore[method-assign]
    with behind_socket(reranker) as running:
        assert asyncio.run(soak(running.url, os.getpid(), 400)).different > 5


def test_an_open_loop_counts_from_when_a_request_was_due(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, seconds=0.4)
    with behind_socket(reranker, max_running=1, max_waiting=3) as running:
        slow, fast = asyncio.run(load(running.url, [1, 20], 3.0, 2.0, 2, 5))
    assert slow.statuses.keys() == {"200"}
    assert slow.p50_s >= 0.4
    assert fast.statuses["429"] > 10
    assert fast.p95_s > 2 * 0.4
    assert fast.goodput < 4
    assert fast.sent == sum(fast.statuses.values())


def test_bodies_are_the_same_each_time_and_share_documents() -> None:
    assert make_body(3, 2, 4) == make_body(3, 2, 4)
    assert make_body(2, 2, 4)["documents"] == make_body(3, 2, 4)["documents"]
    assert make_body(2, 2, 4)["query"] != make_body(3, 2, 4)["query"]


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.95, 4.0), (0.25, 1.0), (0.26, 2.0)])
def test_quantiles(share: float, value: float) -> None:
    assert service_load._quantile([1.0, 2.0, 3.0, 4.0], share) == value
    assert service_load._quantile([], share) == 0.0


def test_the_table() -> None:
    table = load_table([LoadRow(2.0, 9, 1.5, 0.25, 1, 2, {"200": 8, "429": 1})], 5)
    assert table.splitlines()[-1] == "| 2 | 1.50 | 0.25 s | 1.00 s | 2.00 s | 200: 8, 429: 1 |"
