"""What a choice of heads is worth on queries that it has not seen, and how firm it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from .head_methods import Evidence, Method, choose, most_heads
from .head_scores import Quality

if TYPE_CHECKING:
    import numpy as np

FOLDS = 5
# Fewer queries than this in a sample say nothing.
SMALLEST_SAMPLE = 8
MOST_SAMPLES = 3
COUNTS = (1, 2, 4, 8, 12, 16, 32)


@dataclass(frozen=True, slots=True)
class Stability:
    """How far disjoint samples of the queries agree.

    Attributes:
        samples: how many; ``queries`` in the smallest of them.
        overlap: share of the heads that two samples have in common, a mean over pairs; 1 is full
            agreement. ``lowest`` is that of the pair that agrees least.
    """

    samples: int
    queries: int
    overlap: float
    lowest: float


def stability(method: Method, evidence: Evidence, count: int) -> Stability | None:
    """Choose ``count`` heads on disjoint samples and compare; None where there are too few queries.

    There are 3 samples, or 2 where 3 would be smaller than `SMALLEST_SAMPLE`.
    """
    parts = min(MOST_SAMPLES, len(evidence.query_ids) // SMALLEST_SAMPLE)
    if parts < 2:
        return None
    dealt = evidence.deal(parts)
    chosen = [set(choose(method, evidence, sample, [count])[count].heads) for sample in dealt]
    shares = [
        len(one & other) / max(len(one), len(other)) for one, other in combinations(chosen, 2)
    ]
    return Stability(parts, min(map(len, dealt)), sum(shares) / len(shares), min(shares))


def held_out(method: Method, evidence: Evidence, counts: Sequence[int]) -> dict[int, Quality]:
    """How well heads chosen on the other folds rank each fold, for each of ``counts``.

    Every query is ranked once, by heads that were chosen without it. Empty where there are fewer
    queries than folds.
    """
    if len(evidence.query_ids) < FOLDS:
        return {}
    by_query = held_out_by_query(method, evidence, counts)
    return {
        count: Quality(float(ndcg.mean()), float(reciprocal.mean()))
        for count, (ndcg, reciprocal) in by_query.items()
    }


def held_out_by_query(
    method: Method, evidence: Evidence, counts: Sequence[int]
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """nDCG@10 and reciprocal rank of each query, float64 [queries], as in ``held_out``."""
    import numpy as np

    parts = evidence.deal(FOLDS)
    found = {count: np.zeros((2, len(evidence.query_ids))) for count in counts}
    for part in parts:
        others = [row for other in parts if other is not part for row in other]
        for count, choice in choose(method, evidence, others, counts).items():
            found[count][:, part] = evidence.ranked(choice, part)
    return {count: (both[0], both[1]) for count, both in found.items()}


def counts_up_to(method: Method, evidence: Evidence, *more: int) -> list[int]:
    """`COUNTS` and ``more``, as far as ``method`` goes, and all heads where it goes so far."""
    most = most_heads(method, evidence.num_heads)
    every = {*COUNTS, *more, evidence.num_heads}
    return sorted(count for count in every if count <= most)
