"""Which heads tell relevant documents from hard negatives: contrastive scores, and their check."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import BadZipFile

from hook_runtime.specs import Head, ModelInfo

from .heads import Window

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Measurement:
    """What attention was measured on: enough to say where a head set comes from.

    Attributes:
        model: the model that ran; ``name`` is its id.
        data: name of the data; ``data_hash`` of its queries, documents and labels.
        window: documents in one prompt; ``prompt_hash`` of the token ids of a fixed prompt.
        versions: of the packages involved.
    """

    model: ModelInfo
    data: str
    data_hash: str
    window: Window
    max_tokens_per_doc: int
    seed: int
    prompt_hash: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """The attention every head paid to every document of labelled queries.

    Attributes:
        query: float32 [queries, documents, layers, heads]: attention mass of the document,
            averaged over the query's tokens and summed over the document's. Queries with fewer
            documents end in NaN.
        null: the same with the null query "N/A", or None where it was not measured.
        tokens: int32 [queries, documents]: document length in tokens, 0 for padding.
        positive: bool [queries, documents]: which documents answer the query.
    """

    query: np.ndarray
    null: np.ndarray | None
    tokens: np.ndarray
    positive: np.ndarray
    measurement: Measurement

    def values(self, *, calibrated: bool, per_token: bool) -> np.ndarray:
        """float64 [queries, documents, layers, heads]: what a head says of a document.

        ``calibrated`` subtracts the null query's attention (the calibration of ICR, arXiv
        2410.02642); ``per_token`` divides by the document's length.
        """
        import numpy as np

        values = self.query.astype(np.float64)
        if calibrated:
            if self.null is None:
                raise ValueError(
                    "this attention was measured without the null query: measure it with the "
                    "null query, or do not calibrate."
                )
            values -= self.null
        if per_token:
            values /= np.maximum(self.tokens, 1)[:, :, None, None]
        return values

    def save(self, path: str | Path) -> None:
        """Write an ``.npz`` that ``load`` reads back."""
        import numpy as np

        arrays = {"query": self.query, "tokens": self.tokens, "positive": self.positive}
        if self.null is not None:
            arrays["null"] = self.null
        about = np.array(json.dumps(asdict(self.measurement)))
        with Path(path).open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, about=about, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> HeadAttention:
        """Inverse of ``save``; ValueError for a file that is not one of these."""
        import numpy as np

        try:
            with np.load(path, allow_pickle=False) as data:
                about = json.loads(str(data["about"]))
                measurement = Measurement(**{**about, "model": ModelInfo(**about["model"])})
                null = data.get("null")
                return cls(data["query"], null, data["tokens"], data["positive"], measurement)
        except (EOFError, KeyError, TypeError, ValueError, BadZipFile) as error:
            raise ValueError(
                f"{path} does not hold attention saved by this release of core-rerank: give the "
                "file that `core-rerank detect-heads --save` wrote."
            ) from error


def contrastive_scores(values: np.ndarray, positive: np.ndarray, temperature: float) -> np.ndarray:
    """float64 [layers, heads]: how surely each head picks a positive among its hard negatives.

    Per query and positive p: ``exp(s_p/t) / (exp(s_p/t) + sum_n exp(s_n/t))`` over the
    query's negatives n, averaged over positives, then over queries (the contrastive head score
    of CoRe, arXiv 2510.02219). 1 is a head that always sees the positive far ahead.

    Args:
        values: [queries, documents, layers, heads], NaN where there is no document.
        positive: bool [queries, documents].
        temperature: t, in the unit of ``values``; smaller asks only for the right order.
    """
    import numpy as np

    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, not {temperature!r}.")
    total = np.zeros(values.shape[2:])
    for documents, is_positive in zip(values, positive, strict=True):
        scaled = documents / temperature
        there = ~np.isnan(documents[:, 0, 0])
        rivals = np.logaddexp.reduce(scaled[there & ~is_positive], axis=0)
        margin = np.clip(rivals - scaled[is_positive], -700.0, 700.0)
        total += (1.0 / (1.0 + np.exp(margin))).mean(axis=0)
    return total / len(values)


def best_heads(scores: np.ndarray, count: int, max_layers: int | None = None) -> list[Head]:
    """The ``count`` heads of highest score, best first; ties go to the lower layer and head.

    ``max_layers`` looks at the first so many layers only, so that an engine may stop there.
    """
    import numpy as np

    scores = scores[:max_layers]
    if not 1 <= count <= scores.size:
        raise ValueError(f"cannot choose {count} heads of {scores.size}.")
    order = np.argsort(-scores.ravel(), kind="stable")[:count]
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
    import numpy as np

    if heads is None:
        scores = values.sum(axis=(2, 3))
    else:
        layers, numbers = zip(*heads, strict=True)
        scores = values[:, :, list(layers), list(numbers)].sum(axis=2)
    discounts = 1.0 / np.log2(np.arange(2, 12))
    ndcg, reciprocal = [], []
    for row, is_positive in zip(scores, positive, strict=True):
        there = ~np.isnan(row)
        row, relevant = row[there], is_positive[there]
        order = np.lexsort((relevant, -row))
        gains = relevant[order]
        ideal = discounts[: gains.sum()].sum()
        ndcg.append((gains[:10] * discounts[: len(gains)]).sum() / ideal)
        reciprocal.append(1.0 / (1 + int(np.argmax(gains))))
    return Quality(float(np.mean(ndcg)), float(np.mean(reciprocal)))


def random_quality(
    values: np.ndarray, positive: np.ndarray, count: int, *, draws: int = 20, seed: int = 0
) -> Quality:
    """The mean quality of ``count`` heads drawn at random: what choosing must beat."""
    import numpy as np

    layers, heads = values.shape[2:]
    generator = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        picks = generator.choice(layers * heads, size=count, replace=False)
        chosen = [Head(int(i) // heads, int(i) % heads) for i in picks]
        drawn.append(ranking_quality(values, positive, chosen))
    return Quality(
        float(np.mean([q.ndcg_at_10 for q in drawn])), float(np.mean([q.mrr for q in drawn]))
    )
