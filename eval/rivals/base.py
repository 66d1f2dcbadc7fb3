"""What every ranker takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

Task = tuple[str, Sequence[str]]
"""A query and its documents."""


@dataclass(frozen=True, slots=True)
class RankerResult:
    """One query's documents in a ranker's order, and what that cost.

    Attributes:
        order: places in the list given, best first; every place exactly once.
        scores: one per document, in the order given; None where the ranker has only an order.
        seconds: wall-clock time; a batch's time divided by its queries.
        input_tokens: prompt tokens sent to the model, those of a cached prefix included.
        output_tokens: tokens generated; a single one that only ends a prefill is not counted.
        failures: answers of the model that were no complete ordering and had to be mended.
    """

    order: tuple[int, ...]
    scores: tuple[float, ...] | None
    seconds: float
    input_tokens: int
    output_tokens: int = 0
    failures: int = 0


class Ranker(Protocol):
    """Orders documents for a query."""

    name: str

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        """Order the documents of one query."""
        ...

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        """The same for several queries, computed together; in their order."""
        ...


def by_score(scores: Sequence[float]) -> tuple[int, ...]:
    """Places from the highest score to the lowest; the earlier of equals first."""
    return tuple(sorted(range(len(scores)), key=lambda place: -scores[place]))
