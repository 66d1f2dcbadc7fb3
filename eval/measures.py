"""Measures of a run, a query at a time, through pytrec_eval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from core_rerank.errors import MissingDependencyError

if TYPE_CHECKING:
    from .data import Qrels

MAIN = "nDCG@10"
TIE_RULE = (
    "Documents with equal scores keep the order of the run; where a reranker gives equal scores, "
    "that is the first stage's. trec_eval itself would order them by id, backwards."
)
MISSING_RULE = (
    "A judged query that a run misses, because its candidates are none or its reranking failed, "
    "counts 0 in every measure; queries that are not judged are left out."
)
Run = Mapping[str, Mapping[str, float]]
"""Query id -> document id -> score, best first."""


def measure_names(depth: int) -> tuple[str, ...]:
    """What ``measure_run`` measures of runs of ``depth`` documents, in the order of tables."""
    recall = dict.fromkeys(f"recall@{cutoff}" for cutoff in (10, depth) if cutoff <= depth)
    return ("nDCG@1", "nDCG@5", MAIN, "MAP", "MRR@10", *recall)


def measure_run(
    qrels: Qrels, run: Run, depth: int, relevance_level: int = 1
) -> dict[str, dict[str, float]]:
    """Every measure of ``measure_names`` of every judged query: measure -> query id -> value.

    nDCG is trec_eval's (gain = relevance, log2 discount). A document is relevant to the others
    (MAP over the whole run, the reciprocal rank of the first relevant document among ten, recall)
    from ``relevance_level`` up: 1 as usual, 2 for TREC's deep learning tracks. Ties and missing
    queries: see ``TIE_RULE`` and ``MISSING_RULE``.

    Raises:
        ValueError: a score is NaN or infinite.
        MissingDependencyError: pytrec_eval is not installed.
    """
    cutoffs = {name: f"recall.{name[7:]}" for name in measure_names(depth) if "recall" in name}
    asked = {**_TREC, **cutoffs}
    found = _evaluate(qrels, run, set(asked.values()), relevance_level)
    # trec_eval's reciprocal rank knows no cutoff, so it is given the first ten alone.
    best = {
        query_id: {d: scores[d] for d in _order(scores)[:10]} for query_id, scores in run.items()
    }
    measured = {name: _column(qrels, found, asked[name]) for name in asked}
    measured["MRR@10"] = _column(
        qrels, _evaluate(qrels, best, {"recip_rank"}, relevance_level), "recip_rank"
    )
    return {name: measured[name] for name in measure_names(depth)}


def ndcg(qrels: Qrels, run: Run, cutoff: int = 10) -> dict[str, float]:
    """nDCG@cutoff of every judged query, as ``measure_run`` has it and raises."""
    return _column(qrels, _evaluate(qrels, run, {f"ndcg_cut.{cutoff}"}, 1), f"ndcg_cut.{cutoff}")


def recall(qrels: Qrels, run: Run, cutoff: int = 20) -> dict[str, float]:
    """Share of each query's relevant documents (relevance >= 1) among the first ``cutoff``.

    Ties, missing queries and errors are as in ``measure_run``.
    """
    return _column(qrels, _evaluate(qrels, run, {f"recall.{cutoff}"}, 1), f"recall.{cutoff}")


def mean(values: Mapping[str, float]) -> float:
    """Mean over queries."""
    return sum(values.values()) / len(values)


_TREC = {"nDCG@1": "ndcg_cut.1", "nDCG@5": "ndcg_cut.5", MAIN: "ndcg_cut.10", "MAP": "map"}


def _column(
    qrels: Qrels, found: Mapping[str, Mapping[str, float]], measure: str
) -> dict[str, float]:
    """One measure of every judged query; 0 where there is no result."""
    key = measure.replace(".", "_")
    return {query: float(found.get(query, {}).get(key, 0.0)) for query in qrels}


def _evaluate(
    qrels: Qrels, run: Run, measures: set[str], relevance_level: int
) -> dict[str, dict[str, float]]:
    try:
        import pytrec_eval
    except ImportError as error:
        raise MissingDependencyError(
            f"measuring needs pytrec_eval ({error}). "
            "To install it: pip install 'core-rerank[eval]'."
        ) from None
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, measures, relevance_level=relevance_level)
    return evaluator.evaluate({query: _by_rank(query, run[query]) for query in run})


def _by_rank(query: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Scores without ties: the number of documents below."""
    for doc_id, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"query {query!r}: document {doc_id!r} has the score {score}.")
    return {doc_id: float(len(scores) - rank) for rank, doc_id in enumerate(_order(scores))}


def _order(scores: Mapping[str, float]) -> list[str]:
    """Documents from the highest score down; of equal ones the earlier first."""
    return sorted(scores, key=scores.__getitem__, reverse=True)
