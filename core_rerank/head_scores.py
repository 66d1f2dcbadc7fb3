"""Which heads tell relevant documents from hard negatives: scores of heads, and their check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hook_runtime.specs import Head

if TYPE_CHECKING:
    import numpy as np

# Scores that differ by less are the same: a sum's last bits depend on the order of its terms.
SCORE_DECIMALS = 10
CUTOFF = 10
RANDOM_DRAWS = 20


def contrastive_by_query(
    values: np.ndarray, positive: np.ndarray, temperature: float
) -> np.ndarray:
    """float64 [queries, layers, heads]: how surely each head picks a positive, query by query.

    Per positive p: ``exp(s_p/t) / (exp(s_p/t) + sum_n exp(s_n/t))`` over the query's negatives
    n, averaged over positives. Its mean over queries is the contrastive head score of CoRe (arXiv
    2510.02219). 1 is a head that always sees the positive far ahead.

    Args:
        values: [queries, documents, layers, heads], NaN where there is no document.
        positive: bool [queries, documents].
        temperature: t, in the unit of ``values``; smaller asks only for the right order.
    """
    import numpy as np

    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature!r}.")
    scores = np.zeros((len(values), *values.shape[2:]))
    for row, (documents, is_positive) in enumerate(zip(values, positive, strict=True)):
        there = ~np.isnan(documents[:, 0, 0])
        scaled = documents.astype(np.float64) / temperature
        rivals = np.logaddexp.reduce(scaled[there & ~is_positive], axis=0)
        margin = np.clip(rivals - scaled[is_positive], -700.0, 700.0)
        scores[row] = (1.0 / (1.0 + np.exp(margin))).mean(axis=0)
    return scores


def mass_by_query(values: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """float64 [queries, layers, heads]: attention that each head pays to all positives together.

    Its mean over queries is the query-focused retrieval score of QRHead (arXiv 2506.09944): how
    much of the query's attention lies on the documents that answer it, whatever else it sees.
    """
    import numpy as np

    masked = np.where(positive[:, :, None, None], values, np.float32(0))
    return masked.sum(axis=1, dtype=np.float64)


def best_heads(scores: np.ndarray, count: int) -> list[Head]:
    """The ``count`` heads of highest score, best first; ties go to the lower layer and head."""
    import numpy as np

    if not 1 <= count <= scores.size:
        raise ValueError(f"cannot choose {count} heads of {scores.size}.")
    order = np.argsort(-scores.ravel().round(SCORE_DECIMALS), kind="stable")[:count]
    return [Head(int(i) // scores.shape[1], int(i) % scores.shape[1]) for i in order]


@dataclass(frozen=True, slots=True)
class Quality:
    """How well some heads rank the labelled documents: means over queries, 0 to 1."""

    ndcg_at_10: float
    mrr: float


def ranking_quality(
    values: np.ndarray, positive: np.ndarray, heads: Sequence[Head] | None = None
) -> Quality:
    """nDCG@10 and MRR of ranking each query's documents by the sum over ``heads`` (None: all).

    The token filter of the reranker is not applied: it needs more than one number a document.
    Ties count against the positive.
    """
    per_query = quality_by_query(head_sums(values, heads), positive)
    return Quality(*(float(column.mean()) for column in per_query))


def head_sums(
    values: np.ndarray,
    heads: Sequence[Head] | None = None,
    weights: Sequence[float] | None = None,
) -> np.ndarray:
    """float64 [queries, documents]: a document's score by ``heads`` (None: all), NaN kept.

    ``weights``, one per head, make it a weighted sum.
    """
    import numpy as np

    if heads is None:
        return values.sum(axis=(2, 3), dtype=np.float64)
    layers, numbers = zip(*heads, strict=True)
    picked = values[:, :, list(layers), list(numbers)].astype(np.float64)
    return picked.sum(axis=2) if weights is None else picked @ np.asarray(weights, np.float64)


def quality_by_query(scores: np.ndarray, positive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """nDCG@10 and reciprocal rank, both float64 [queries], of scores [queries, documents]."""
    import numpy as np

    ndcg, reciprocal = np.zeros(len(scores)), np.zeros(len(scores))
    for row, (document_scores, is_positive) in enumerate(zip(scores, positive, strict=True)):
        there = ~np.isnan(document_scores)
        ranks = positive_ranks(document_scores[there, None], is_positive[there])
        ndcg[row] = ndcg_of_ranks(ranks)[0]
        reciprocal[row] = 1.0 / ranks.min()
    return ndcg, reciprocal


def positive_ranks(scores: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """Where each positive ranks, from 1: [documents, choices] to int [positives, choices].

    Sorted along the first axis. Ties count against a positive; no score is NaN.
    """
    import numpy as np

    good = -np.sort(-scores[positive], axis=0)
    above = (scores[~positive][:, None] >= good[None]).sum(axis=0)
    return above + np.arange(1, len(good) + 1)[:, None]


def ndcg_of_ranks(ranks: np.ndarray) -> np.ndarray:
    """nDCG@10 (gain 1, log2 discount) from the ranks of all positives: [positives, n] to [n]."""
    import numpy as np

    gains = np.where(ranks <= CUTOFF, 1.0 / np.log2(ranks + 1.0), 0.0)
    ideal = (1.0 / np.log2(np.arange(2, 2 + min(len(ranks), CUTOFF)))).sum()
    return gains.sum(axis=0) / ideal


def random_quality(
    values: np.ndarray, positive: np.ndarray, count: int, *, seed: int = 0
) -> Quality:
    """The mean quality of ``count`` heads drawn `RANDOM_DRAWS` times: what choosing must beat."""
    import numpy as np

    layers, heads = values.shape[2:]
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(RANDOM_DRAWS):
        picks = generator.choice(layers * heads, size=count, replace=False)
        chosen = [Head(int(i) // heads, int(i) % heads) for i in picks]
        drawn.append(ranking_quality(values, positive, chosen))
    return Quality(
        float(np.mean([q.ndcg_at_10 for q in drawn])), float(np.mean([q.mrr for q in drawn]))
    )
