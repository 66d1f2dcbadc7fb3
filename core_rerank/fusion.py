"""Rank fusion of two scorings of the same documents: a first stage's and a reranker's.

Both give one score per document, in one order (the first stage's, best first); higher is better.
The fused scores come back in that order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .inputs import check_top_n
from .types import Ranking

RRF_K = 60.0
Normalisation = Literal["minmax", "z"]


@dataclass(frozen=True, slots=True)
class Fusion:
    """How two scorings become one.

    Attributes:
        weight: None for reciprocal rank fusion; else the reranker's share, 0 to 1, of a weighted
            sum of normalised scores (the first stage has the rest).
        k: the constant of reciprocal rank fusion, at least 0.
        normalisation: of the weighted sum, within one query: "minmax" to 0..1, or "z" to mean 0
            and standard deviation 1.

    Raises:
        ValueError: a value is out of range.
    """

    weight: float | None = None
    k: float = RRF_K
    normalisation: Normalisation = "minmax"

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 <= self.weight <= 1:
            raise ValueError(f"a fusion's weight must be between 0 and 1, not {self.weight!r}.")
        if not 0 <= self.k < math.inf:
            raise ValueError(f"k must be a finite number of at least 0, not {self.k!r}.")
        if self.normalisation not in ("minmax", "z"):
            raise ValueError(f"normalisation must be 'minmax' or 'z', not {self.normalisation!r}.")

    @classmethod
    def parse(cls, text: str) -> Fusion:
        """``rrf``, or the reranker's weight, such as ``0.5``; ValueError otherwise."""
        if text == "rrf":
            return cls()
        try:
            return cls(float(text))
        except ValueError:
            raise ValueError(
                f"a fusion must be 'rrf' or the reranker's weight from 0 to 1, not {text!r}."
            ) from None

    def __str__(self) -> str:
        return "rrf" if self.weight is None else f"{self.weight:g}"

    def fuse(self, first: Sequence[float], reranked: Sequence[float]) -> list[float]:
        """One score per document out of a first stage's and a reranker's.

        Raises:
            ValueError: the two differ in length, or a score is NaN or infinite.
        """
        first, reranked = [float(s) for s in first], [float(s) for s in reranked]
        if self.weight is None:
            return fuse_ranks(first, reranked, k=self.k)
        return fuse_scores(first, reranked, self.weight, self.normalisation)


def fuse_ranks(a: Sequence[float], b: Sequence[float], *, k: float = RRF_K) -> list[float]:
    """Reciprocal rank fusion: 1 / (k + rank in a) + 1 / (k + rank in b), ranks from 1.

    Cormack, Clarke and Buettcher, SIGIR 2009. Equal scores rank in the order given.

    >>> fuse_ranks([3.0, 2.0, 1.0], [0.1, 0.9, 0.2], k=0)
    [1.3333333333333333, 1.5, 0.8333333333333333]
    """
    _check(a, b)
    return [1 / (k + i) + 1 / (k + j) for i, j in zip(_ranks(a), _ranks(b), strict=True)]


def fuse_scores(
    a: Sequence[float], b: Sequence[float], weight: float, normalisation: Normalisation = "minmax"
) -> list[float]:
    """``(1 - weight) * normalised a + weight * normalised b``, each normalised over its documents.

    Scores that are all equal say nothing, and become 0.

    >>> fuse_scores([3.0, 2.0, 1.0], [0.0, 4.0, 1.0], 0.5)
    [0.5, 0.75, 0.125]
    """
    _check(a, b)
    normalise = min_max if normalisation == "minmax" else standardise
    return [(1 - weight) * x + weight * y for x, y in zip(normalise(a), normalise(b), strict=True)]


def min_max(scores: Sequence[float]) -> list[float]:
    """Scores moved and scaled to 0..1; all 0 where they are all equal."""
    low, high = min(scores, default=0.0), max(scores, default=0.0)
    return [(score - low) / (high - low) if high > low else 0.0 for score in scores]


def standardise(scores: Sequence[float]) -> list[float]:
    """Scores less their mean, over their standard deviation; all 0 where they are all equal."""
    if not scores or min(scores) == max(scores):
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
    return [(score - mean) / deviation for score in scores]


def _ranks(scores: Sequence[float]) -> list[int]:
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    ranks = [0] * len(scores)
    for rank, place in enumerate(order, start=1):
        ranks[place] = rank
    return ranks


def _check(a: Sequence[float], b: Sequence[float]) -> None:
    if len(a) != len(b):
        raise ValueError(f"both scorings must have one score per document: {len(a)} and {len(b)}.")
    for score in (*a, *b):
        if not math.isfinite(score):
            raise ValueError(f"scores to be fused must be finite numbers, not {score!r}.")


def fuse(
    ranking: Ranking,
    first_stage: Sequence[float],
    how: Fusion | str | float = "rrf",
    *,
    top_n: int | None = None,
) -> Ranking:
    """``ranking`` with each document's score fused with the one its first stage gave it.

    Args:
        ranking: of all documents that were given, so without ``top_n``.
        first_stage: one score per document, in the order they were given to the reranker; a list
            or an array.
        how: "rrf", the reranker's weight from 0 to 1, or a `Fusion`.
        top_n: how many documents to return; None: all.

    Raises:
        ValueError: the ranking and the scores are not of the same documents, a score is NaN or
            infinite, or ``how`` or ``top_n`` is out of range.
    """
    fusion = how if isinstance(how, Fusion) else Fusion.parse(str(how))
    top_n = check_top_n(top_n)
    if sorted(item.index for item in ranking) != list(range(len(first_stage))):
        raise ValueError(
            f"{len(first_stage)} first-stage scores were given for a ranking of {len(ranking)} "
            "documents: give one for each document, and rank without top_n."
        )
    items = sorted(ranking, key=lambda item: item.index)
    scores = fusion.fuse(first_stage, [item.score for item in items])
    best_first = sorted(items, key=lambda item: (-scores[item.index], item.index))
    return replace(
        ranking,
        documents=tuple(
            replace(item, score=scores[item.index], rank=rank)
            for rank, item in enumerate(best_first[:top_n], start=1)
        ),
        strategy=f"{ranking.strategy}+{fusion}",
    )
