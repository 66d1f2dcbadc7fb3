"""nDCG@10 by hand, and the paired bootstrap."""

from __future__ import annotations

import math
import sys

import pytest

from core_rerank.errors import MissingDependencyError
from core_rerank.eval.measures import mean, ndcg, paired_bootstrap, recall


def test_ndcg_by_hand() -> None:
    qrels = {"q": {"a": 2, "b": 1, "c": 0}}
    run = {"q": {"x": 9.0, "a": 5.0, "c": 3.0, "b": 1.0}}
    ideal = 2 + 1 / math.log2(3)
    assert ndcg(qrels, run)["q"] == pytest.approx((2 / math.log2(3) + 1 / math.log2(5)) / ideal)
    assert ndcg(qrels, run, cutoff=2)["q"] == pytest.approx((2 / math.log2(3)) / ideal)


def test_missing_queries_count_zero_and_unjudged_ones_are_left_out() -> None:
    qrels = {"q1": {"a": 1}, "q2": {"a": 1}, "q3": {"a": 1}, "q4": {"a": 0}}
    run = {"q1": {"a": 1.0}, "q3": {}, "q4": {"a": 1.0}, "other": {"a": 1.0}}
    assert ndcg(qrels, run) == {"q1": 1.0, "q2": 0.0, "q3": 0.0, "q4": 0.0}
    assert mean(ndcg(qrels, run)) == 0.25


def test_equal_scores_keep_the_runs_order() -> None:
    qrels = {"q": {"b": 1}}
    assert ndcg(qrels, {"q": {"b": 0.5, "z": 0.5, "a": 0.5}})["q"] == 1.0
    assert ndcg(qrels, {"q": {"a": 0.5, "b": 0.5}})["q"] == pytest.approx(1 / math.log2(3))


def test_documents_beyond_the_cutoff_do_not_count() -> None:
    run = {"q": {**{f"d{i}": 20.0 - i for i in range(10)}, "a": 1.0}}
    assert ndcg({"q": {"a": 1}}, run) == {"q": 0.0}


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_scores_must_be_finite(score: float) -> None:
    with pytest.raises(ValueError, match="query 'q': document 'a' has the score"):
        ndcg({"q": {"a": 1}}, {"q": {"a": score}})


def test_bootstrap_covers_the_mean_and_is_deterministic() -> None:
    differences = [0.1] * 30 + [-0.05] * 10
    low, high = paired_bootstrap(differences)
    assert low < sum(differences) / 40 < high
    assert (low, high) == paired_bootstrap(differences)
    assert paired_bootstrap([0.25, 0.25]) == (0.25, 0.25)
    narrow = paired_bootstrap(differences, confidence=0.5)
    assert low < narrow[0] < narrow[1] < high
    with pytest.raises(ValueError, match="at least one query"):
        paired_bootstrap([])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[eval\]'"):
        ndcg({"q": {"a": 1}}, {})


def test_recall_is_the_share_of_relevant_documents_found() -> None:
    qrels = {"q": {"a": 1, "b": 2, "c": 0}, "missing": {"a": 1}}
    run = {"q": {"c": 3.0, "b": 2.0, "x": 1.0, "a": 0.5}}
    assert recall(qrels, run, 3) == {"q": 0.5, "missing": 0.0}
    assert recall(qrels, run, 4) == {"q": 1.0, "missing": 0.0}
