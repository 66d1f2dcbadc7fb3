"""nDCG and recall a query through pytrec_eval, and what may be said about a difference of means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from core_rerank.errors import MissingDependencyError

if TYPE_CHECKING:
    from .data import Qrels

SEED = 20240607


def ndcg(
    qrels: Qrels, run: Mapping[str, Mapping[str, float]], cutoff: int = 10
) -> dict[str, float]:
    """nDCG@cutoff of every judged query, trec_eval's definition (gain = relevance, log2 discount).

    Documents with equal scores keep the run's order (trec_eval itself would sort them by id). A
    judged query that the run misses counts 0; a query that is not judged is left out.

    Raises:
        ValueError: a score is NaN or infinite.
        MissingDependencyError: pytrec_eval is not installed.
    """
    return _per_query(qrels, run, "ndcg_cut", cutoff)


def recall(
    qrels: Qrels, run: Mapping[str, Mapping[str, float]], cutoff: int = 20
) -> dict[str, float]:
    """Share of each query's relevant documents (relevance >= 1) among the first ``cutoff``.

    Ties, missing queries and errors are as in ``ndcg``.
    """
    return _per_query(qrels, run, "recall", cutoff)


def _per_query(
    qrels: Qrels, run: Mapping[str, Mapping[str, float]], measure: str, cutoff: int
) -> dict[str, float]:
    try:
        import pytrec_eval
    except ImportError as error:
        raise MissingDependencyError(
            f"measuring needs pytrec_eval ({error}). "
            "To install it: pip install 'core-rerank[eval]'."
        ) from None
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {f"{measure}.{cutoff}"})
    results = evaluator.evaluate({query: _by_rank(query, run[query]) for query in run})
    key = f"{measure}_{cutoff}"
    return {query: float(results[query][key]) if query in results else 0.0 for query in qrels}


def _by_rank(query: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Scores without ties: the number of documents below."""
    for doc_id, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"query {query!r}: document {doc_id!r} has the score {score}.")
    best_first = sorted(scores, key=scores.__getitem__, reverse=True)
    return {doc_id: float(len(scores) - rank) for rank, doc_id in enumerate(best_first)}


def mean(values: Mapping[str, float]) -> float:
    """Mean over queries."""
    return sum(values.values()) / len(values)


def paired_bootstrap(
    differences: Sequence[float], confidence: float = 0.95, samples: int = 10_000
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of per-query differences; fixed seed.

    Queries are drawn with replacement, the same ones for both systems, which is what makes the
    interval paired.
    """
    import numpy as np

    values = np.asarray(differences, dtype=np.float64)
    if values.size == 0:
        raise ValueError("a bootstrap needs the difference of at least one query.")
    draws = np.random.default_rng(SEED).integers(0, values.size, (samples, values.size))
    means = values[draws].mean(axis=1)
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)
