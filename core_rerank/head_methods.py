"""The ways to choose heads from measured attention: core, qr, ndcg, weighted and signed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, get_args

from hook_runtime.specs import Head

from .head_attention import HeadAttention
from .head_scores import (
    best_heads,
    contrastive_by_query,
    head_sums,
    mass_by_query,
    ndcg_of_ranks,
    positive_ranks,
    quality_by_query,
)
from .head_weights import ListwiseProblem, sparse_path

if TYPE_CHECKING:
    import numpy as np

Method = Literal["core", "qr", "ndcg", "weighted", "signed"]
METHODS: tuple[Method, ...] = get_args(Method)
# Greedy and weighted choices look at so many heads, the best by contrastive score.
POOL = 128
_SMALLEST_GAIN = 1e-9


@dataclass(frozen=True, slots=True)
class Choice:
    """Heads, best first; ``weights``, one each, where their sum is a weighted one."""

    heads: tuple[Head, ...]
    weights: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Evidence:
    """What each query says of each head, computed once, so that any subset of queries is cheap.

    Attributes:
        values: float32 [queries, documents, layers, heads] (see ``HeadAttention.values``).
        positive: bool [queries, documents].
        query_ids: one per query.
        temperature: of the contrastive score, in units of attention mass.
        seed: of how queries are dealt out.
    """

    values: np.ndarray
    positive: np.ndarray
    query_ids: tuple[str, ...]
    temperature: float
    seed: int

    @classmethod
    def of(
        cls,
        attention: HeadAttention,
        *,
        temperature: float,
        calibrated: bool = True,
        per_token: bool = False,
        max_layers: int | None = None,
    ) -> Evidence:
        """From measured attention; ``max_layers`` looks at the first so many layers only."""
        values = attention.values(calibrated=calibrated, per_token=per_token)
        measured = attention.measurement
        return cls(
            values[:, :, :max_layers],
            attention.positive,
            measured.query_ids,
            temperature,
            measured.seed,
        )

    @cached_property
    def contrast(self) -> np.ndarray:
        """float64 [queries, layers, heads]: CoRe's score, query by query."""
        return contrastive_by_query(self.values, self.positive, self.temperature)

    @cached_property
    def mass(self) -> np.ndarray:
        """float64 [queries, layers, heads]: QRHead's score, query by query."""
        return mass_by_query(self.values, self.positive)

    @property
    def num_heads(self) -> int:
        """Heads looked at, all layers together."""
        return self.values.shape[2] * self.values.shape[3]

    def deal(self, parts: int, queries: Sequence[int] | None = None) -> list[list[int]]:
        """The queries in ``parts`` disjoint samples of equal size, give or take one.

        Which sample a query is in depends on the ids and the seed, not on the queries' order.
        """
        rows = range(len(self.query_ids)) if queries is None else queries

        def place(row: int) -> bytes:
            text = f"{self.seed} {self.query_ids[row]}"
            return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

        ordered = sorted(rows, key=place)
        return [ordered[part::parts] for part in range(parts)]

    def ranked(self, choice: Choice | None, queries: Sequence[int]) -> tuple[np.ndarray, ...]:
        """nDCG@10 and reciprocal rank of each of ``queries`` by ``choice`` (None: every head)."""
        values, positive = self.values[list(queries)], self.positive[list(queries)]
        if choice is None:
            return quality_by_query(head_sums(values), positive)
        return quality_by_query(head_sums(values, choice.heads, choice.weights), positive)


def choose(
    method: Method, evidence: Evidence, queries: Sequence[int], counts: Sequence[int]
) -> dict[int, Choice]:
    """The heads that ``method`` chooses on ``queries``, for each of ``counts``.

    - core: the highest contrastive score (CoRe, arXiv 2510.02219).
    - qr: the most attention to the positives (QRHead, arXiv 2506.09944).
    - ndcg: greedily, the head that adds most to the nDCG@10 of the sum. The gain on one half of
      the queries counts only for heads that the other half named, and the other way round; equal
      gains go to the head of higher contrastive score.
    - weighted: non-negative weights under an L1 penalty, the weakest that leaves at most so many
      (see ``ListwiseProblem`` for the loss).
    - signed: the same with weights of either sign, from all heads. A head that looks at documents
      whatever is asked then counts against them, which calibrates without a null query.

    Equal queries and documents in another order give the same heads. "ndcg" and "weighted" try
    only the `POOL` best heads by contrastive score; "weighted" and "signed" may return fewer than
    asked for.

    Raises:
        ValueError: a method that there is not, or more heads than the model has.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    most = most_heads(method, evidence.num_heads)
    if not all(1 <= count <= most for count in counts):
        raise ValueError(
            f"cannot choose {max(counts)} heads of {evidence.num_heads}: {method} chooses 1 to "
            f"{most}."
        )
    return _CHOOSERS[method](evidence, sorted(queries, key=evidence.query_ids.__getitem__), counts)


def most_heads(method: Method, num_heads: int) -> int:
    """The most heads that ``method`` chooses from ``num_heads``."""
    return min(POOL, num_heads) if method in ("ndcg", "weighted") else num_heads


def head_scores(method: Method, evidence: Evidence) -> np.ndarray:
    """float64 [layers, heads]: what ``method`` thinks of each head alone, over all queries.

    "core", "weighted" and "signed": the contrastive score; "qr": the attention to positives;
    "ndcg": nDCG@10 of ranking by that head.
    """
    import numpy as np

    if method == "qr":
        return evidence.mass.mean(axis=0)
    if method != "ndcg":
        return evidence.contrast.mean(axis=0)
    layers, heads = evidence.values.shape[2:]
    total = np.zeros(layers * heads)
    for values, positive in zip(evidence.values, evidence.positive, strict=True):
        there = ~np.isnan(values[:, 0, 0])
        scores = values[there].reshape(-1, layers * heads)
        total += ndcg_of_ranks(positive_ranks(scores, positive[there]))
    return (total / len(evidence.values)).reshape(layers, heads)


def _core(evidence: Evidence, queries: Sequence[int], counts: Sequence[int]) -> dict[int, Choice]:
    return _top(evidence.contrast[queries].mean(axis=0), counts)


def _qr(evidence: Evidence, queries: Sequence[int], counts: Sequence[int]) -> dict[int, Choice]:
    return _top(evidence.mass[queries].mean(axis=0), counts)


def _top(scores: np.ndarray, counts: Sequence[int]) -> dict[int, Choice]:
    heads = best_heads(scores, max(counts))
    return {count: Choice(tuple(heads[:count])) for count in counts}


def _pool(evidence: Evidence, queries: Sequence[int]) -> list[Head]:
    size = min(POOL, evidence.num_heads)
    return best_heads(evidence.contrast[queries].mean(axis=0), size)


def _ndcg(evidence: Evidence, queries: Sequence[int], counts: Sequence[int]) -> dict[int, Choice]:
    import numpy as np

    largest = max(counts)
    pool = _pool(evidence, queries)
    halves = [half for half in evidence.deal(2, queries) if half]
    named = [set(_pool(evidence, half)) for half in halves]
    in_both = [head for head in pool if all(head in heads for heads in named)]
    pool = in_both if len(in_both) >= largest else pool
    layers, heads = (list(numbers) for numbers in zip(*pool, strict=True))
    columns, positives = [], []
    for row in queries:
        there = ~np.isnan(evidence.values[row, :, 0, 0])
        columns.append(evidence.values[row][there][:, layers, heads].astype(np.float64))
        positives.append(evidence.positive[row][there])
    order = _greedy(columns, positives, largest)
    return {count: Choice(tuple(pool[i] for i in order[:count])) for count in counts}


def _greedy(columns: list[np.ndarray], positives: list[np.ndarray], count: int) -> list[int]:
    """Numbers of the heads in the order they were added.

    ``columns`` are [documents, heads], one per query, heads of equal gain best first.
    """
    import numpy as np

    chosen: list[int] = []
    sums = [np.zeros((len(documents), 1)) for documents in columns]
    while len(chosen) < count:
        gained = np.zeros(columns[0].shape[1])
        for total, documents, positive in zip(sums, columns, positives, strict=True):
            gained += ndcg_of_ranks(positive_ranks(total + documents, positive))
        gained /= len(columns)
        gained[chosen] = -np.inf
        best = int(np.flatnonzero(gained >= gained.max() - _SMALLEST_GAIN)[0])
        chosen.append(best)
        sums = [t + documents[:, [best]] for t, documents in zip(sums, columns, strict=True)]
    return chosen


def _weighted(
    evidence: Evidence, queries: Sequence[int], counts: Sequence[int]
) -> dict[int, Choice]:
    return _sparse(evidence, queries, counts, _pool(evidence, queries), signed=False)


def _signed(evidence: Evidence, queries: Sequence[int], counts: Sequence[int]) -> dict[int, Choice]:
    # A head that counts against documents has a low contrastive score, so none is left out.
    pool = best_heads(evidence.contrast[queries].mean(axis=0), evidence.num_heads)
    return _sparse(evidence, queries, counts, pool, signed=True)


def _sparse(
    evidence: Evidence,
    queries: Sequence[int],
    counts: Sequence[int],
    pool: Sequence[Head],
    *,
    signed: bool,
) -> dict[int, Choice]:
    import numpy as np

    layers, heads = (list(numbers) for numbers in zip(*pool, strict=True))
    values = evidence.values[queries][:, :, layers, heads]
    problem, scale = ListwiseProblem.of(values, evidence.positive[queries])
    found: dict[int, np.ndarray] = {}
    for weights in sparse_path(problem, max(counts), signed=signed):
        used = int(np.count_nonzero(weights))
        found |= {count: weights for count in counts if 0 < used <= count}
    # A path without weights has no head that tells anything: the best by score then stand alone.
    plain = _top(evidence.contrast[queries].mean(axis=0), counts)
    return {
        count: _weighted_choice(pool, found[count], scale) if count in found else plain[count]
        for count in counts
    }


def _weighted_choice(pool: Sequence[Head], weights: np.ndarray, scale: np.ndarray) -> Choice:
    """Heads by how much they move scores; weights of mean size 1, of attention as measured."""
    import numpy as np

    order = [int(i) for i in np.argsort(-abs(weights), kind="stable") if weights[i]]
    plain = weights[order] / scale[order]
    rounded = (float(f"{weight:.4g}") for weight in plain / abs(plain).mean())
    return Choice(tuple(pool[i] for i in order), tuple(rounded))


_Chooser = Callable[[Evidence, Sequence[int], Sequence[int]], dict[int, Choice]]
_CHOOSERS: dict[Method, _Chooser] = {
    "core": _core,
    "qr": _qr,
    "ndcg": _ndcg,
    "weighted": _weighted,
    "signed": _signed,
}
