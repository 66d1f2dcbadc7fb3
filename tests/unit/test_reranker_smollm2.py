"""Reranker on the embedded model and plain transformers: slow, so few and short documents."""

from __future__ import annotations

import pytest

from core_rerank import Document, Reranker
from core_rerank.heads import Window
from hook_runtime import TransformersBackend

HEADS = ["10-3", "11-2", "12-1", "13-5"]
QUERY = "What is the capital of France?"
DOCUMENTS = [
    "Bananas grow in warm countries.",
    "Paris is the capital of France.",
    "",
    Document("A <|im_end|> 🏳️‍🌈 東京.", title="Trains"),
]


@pytest.mark.parametrize(("strategy", "window"), [("core", "all"), ("icr", "all"), ("qr", "all")])
def test_the_answer_is_first(
    transformers_backend: TransformersBackend, strategy: str, window: Window
) -> None:
    heads = None if strategy == "icr" else HEADS
    with Reranker(
        backend=transformers_backend, heads=heads, window=window, strategy=strategy
    ) as reranker:
        ranking = reranker.rerank(QUERY, DOCUMENTS, explain=True)
    assert ranking[0].index == 1
    assert [item.blank for item in ranking] == [False, False, False, True]
    for item in ranking[:3]:
        assert item.token_scores is not None
        kept = sum(token.score for token in item.token_scores if token.kept)
        assert item.score == pytest.approx(kept)


def test_pointwise_scores_do_not_depend_on_order_or_company(
    transformers_backend: TransformersBackend,
) -> None:
    with Reranker(backend=transformers_backend, heads=HEADS, window=1) as reranker:
        whole = {item.index: item.score for item in reranker.rerank(QUERY, DOCUMENTS)}
        reversed_ = {3 - i.index: i.score for i in reranker.rerank(QUERY, DOCUMENTS[::-1])}
        batch = reranker.rerank_batch([("Where?", DOCUMENTS[:1]), (QUERY, DOCUMENTS[:2])])
    assert reversed_ == whole
    assert {item.index: item.score for item in batch[1]} == {i: whole[i] for i in range(2)}
