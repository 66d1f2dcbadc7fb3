"""BEIR's own scripts with `BeirReranker` in the place of a cross-encoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from beir.reranking import Rerank
from beir.retrieval.evaluation import EvaluateRetrieval
from evaluations import CORPUS, QRELS, QUERIES, TOPICS
from fake_backend import FakeBackend

from core_rerank.eval import BeirReranker
from core_rerank.eval.measures import mean, ndcg
from core_rerank.reranker import Reranker

BEIR_CORPUS = {name: {"title": "", "text": d.text} for name, d in CORPUS.items()}
RESULTS = {
    query_id: {name: float(place) for place, name in enumerate(TOPICS)} for query_id in QUERIES
}


@pytest.fixture
def reranker(smollm2_tokenizer: Any) -> Iterator[Reranker]:
    backend = FakeBackend(smollm2_tokenizer)
    with Reranker(backend=backend, heads=["0-0"], window=1, calibrate=False) as made:
        yield made


class ByReranker:
    """The cross-encoder that BEIR's `Rerank` expects, by the same reranker."""

    def __init__(self, reranker: Reranker) -> None:
        self._reranker = reranker

    def predict(self, pairs: list[list[str]], batch_size: int) -> list[float]:
        return [self._reranker.rerank(query, [text])[0].score for query, text in pairs]


@pytest.mark.parametrize("top_k", [3, 6, 100])
def test_the_call_and_the_answer_are_beirs(reranker: Reranker, top_k: int) -> None:
    given = (BEIR_CORPUS, QUERIES, RESULTS, top_k)
    theirs = Rerank(ByReranker(reranker), batch_size=2).rerank(*given)
    ours = BeirReranker(reranker, batch=4).rerank(*given)
    assert {q: set(scores) for q, scores in ours.items()} == {q: set(s) for q, s in theirs.items()}
    assert ours == {q: pytest.approx(scores) for q, scores in theirs.items()}
    for scores in ours.values():  # without ties, which BEIR would order by id
        assert list(scores.values()) == sorted(set(scores.values()), reverse=True)
    measured = EvaluateRetrieval.evaluate(QRELS, ours, [10], ignore_identical_ids=False)
    assert measured[0]["NDCG@10"] == pytest.approx(mean(ndcg(QRELS, ours)), abs=1e-5)


def test_titles_are_read_and_queries_without_results_stay(reranker: Reranker) -> None:
    corpus = {"a": {"title": "Ocean tides", "text": "By the moon."}, "b": {"text": "By the moon."}}
    results = {"q": {"b": 1.0, "a": 0.5}, "none": {}}
    found = BeirReranker(reranker).rerank(corpus, {"q": "ocean tides"}, results, 2)
    assert list(found) == ["q", "none"]
    assert list(found["q"]) == ["a", "b"]
    assert found["none"] == {}
    assert results == {"q": {"b": 1.0, "a": 0.5}, "none": {}}


def test_arguments_are_checked(reranker: Reranker) -> None:
    with pytest.raises(ValueError, match="top_k must be"):
        BeirReranker(reranker).rerank({}, {}, {}, 0)
    with pytest.raises(ValueError, match="batch must be"):
        BeirReranker(reranker, batch=0)
    with pytest.raises(KeyError, match="absent"):
        BeirReranker(reranker).rerank({}, {"q": "x"}, {"q": {"absent": 1.0}}, 1)
