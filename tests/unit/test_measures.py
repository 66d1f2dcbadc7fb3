"""Measures by hand, and beside pytrec_eval's own on the edge cases."""

from __future__ import annotations

import math
import sys

import pytest
import pytrec_eval

from core_rerank.errors import MissingDependencyError
from core_rerank.eval.measures import (
    TIE_RULE,
    mean,
    measure_names,
    measure_run,
    ndcg,
    recall,
)


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


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytrec_eval", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[eval\]'"):
        ndcg({"q": {"a": 1}}, {})


def test_recall_is_the_share_of_relevant_documents_found() -> None:
    qrels = {"q": {"a": 1, "b": 2, "c": 0}, "missing": {"a": 1}}
    run = {"q": {"c": 3.0, "b": 2.0, "x": 1.0, "a": 0.5}}
    assert recall(qrels, run, 3) == {"q": 0.5, "missing": 0.0}
    assert recall(qrels, run, 4) == {"q": 1.0, "missing": 0.0}


# ------------------------------------------------------------------ beside pytrec_eval's

TREC = {
    "nDCG@1": "ndcg_cut_1",
    "nDCG@5": "ndcg_cut_5",
    "nDCG@10": "ndcg_cut_10",
    "MAP": "map",
    "recall@10": "recall_10",
    "recall@20": "recall_20",
}
EDGE_CASES = {
    "graded": ({"a": 3, "b": 1, "c": 0, "d": 2}, {"c": 4.0, "a": 3.0, "x": 2.0, "d": 1.0}),
    "nothing relevant": ({"a": 0}, {"a": 1.0, "b": 0.5}),
    "judged negatively": ({"a": -1, "b": 1}, {"a": 2.0, "b": 1.0}),
    "nothing judged was found": ({"a": 1}, {"x": 2.0, "y": 1.0}),
    "nothing was found": ({"a": 1}, {}),
    "more relevant than found": ({f"d{i}": 1 for i in range(30)}, {"d3": 2.0, "d9": 1.0}),
    "deeper than every cutoff": (
        {"d15": 1, "d19": 2, "d25": 1},
        {f"d{i}": 100.0 - i for i in range(30)},
    ),
    "negative scores": ({"a": 1}, {"b": -1.0, "a": -2.0}),
    "one document": ({"a": 1}, {"a": 0.0}),
}


@pytest.mark.parametrize("case", EDGE_CASES)
@pytest.mark.parametrize("level", [1, 2])
def test_measures_equal_pytrec_evals(case: str, level: int) -> None:
    judged, scores = EDGE_CASES[case]
    qrels, run = {"q": judged}, {"q": scores}
    names = {"ndcg_cut.1,5,10", "map", "recall.10,20"}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, names, relevance_level=level)
    expected = evaluator.evaluate(run).get("q", {})
    found = measure_run(qrels, run, depth=20, relevance_level=level)
    assert {name: found[name]["q"] for name in TREC} == {
        name: expected.get(theirs, 0.0) for name, theirs in TREC.items()
    }
    relevant = [i for i, d in enumerate(scores) if judged.get(d, 0) >= level and i < 10]
    assert found["MRR@10"]["q"] == pytest.approx(1 / (relevant[0] + 1) if relevant else 0.0)


def test_tied_scores_equal_pytrec_evals_once_it_is_given_the_runs_order() -> None:
    qrels = {"q": {"b": 1, "c": 2}}
    tied, told = {"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 3.0, "b": 2.0, "c": 1.0}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10"})
    ours = measure_run(qrels, {"q": tied}, depth=3)["nDCG@10"]["q"]
    assert ours == evaluator.evaluate({"q": told})["q"]["ndcg_cut_10"]
    assert ours < evaluator.evaluate({"q": tied})["q"]["ndcg_cut_10"]  # by id, backwards
    assert "keep the order of the run" in TIE_RULE


def test_every_measure_counts_a_missing_query_as_zero() -> None:
    found = measure_run({"q1": {"a": 1}, "q2": {"a": 1}}, {"q1": {"a": 1.0}}, depth=40)
    assert tuple(found) == measure_names(40)
    assert all(list(values) == ["q1", "q2"] for values in found.values())
    assert all(values["q2"] == 0.0 for values in found.values())
    assert {mean(values) for values in found.values()} == {0.5}


def test_recall_is_measured_at_ten_and_at_the_depth() -> None:
    assert measure_names(40)[-2:] == ("recall@10", "recall@40")
    assert measure_names(10)[-1] == "recall@10"
    assert measure_names(5)[-2:] == ("MRR@10", "recall@5")
