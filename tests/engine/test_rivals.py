"""Listwise generation on the real engine: an order, and what it cost."""

from __future__ import annotations

import pytest

from core_rerank.eval.rivals import CoreRanker, ListwiseRanker
from hook_runtime.engine import HookLLM

pytestmark = pytest.mark.engine

DOCUMENTS = [
    "The glacier covers half of the island.",
    "Copper was mined in the harbour's hills until 1920.",
    "A treaty of 1648 divided the island.",
    "The violin is tuned in fifths.",
    "An enzyme changes the protein.",
]


def test_listwise_generation_orders_every_document(engine: HookLLM) -> None:
    ranker = ListwiseRanker(engine, engine.tokenizer, engine.model.max_model_len, window=3, step=1)
    result = ranker.rank("Who divided the island?", DOCUMENTS)
    assert sorted(result.order) == list(range(len(DOCUMENTS)))
    assert 0 <= result.failures <= 3
    assert result.input_tokens > 3 * len(engine.tokenizer(DOCUMENTS[0])["input_ids"])
    assert result.output_tokens > 0
    assert result.seconds > 0


def test_core_rerank_is_a_ranker_on_the_same_engine(engine: HookLLM) -> None:
    ranker = CoreRanker(engine, heads=["9-2", "8-0", "7-7"])
    result = ranker.rank("Who divided the island by a treaty?", DOCUMENTS)
    assert result.order[0] == 2
    assert result.scores is not None
    assert result.failures == 0
