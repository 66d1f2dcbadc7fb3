"""What head detection reads: every head's attention to the documents of labelled queries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from hook_runtime.specs import ModelInfo

from .heads import Window

if TYPE_CHECKING:
    import numpy as np

Rows = Literal["query", "instruction"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What attention was measured on: enough to say where a head set comes from.

    Attributes:
        model: the model that ran; ``name`` is its id.
        data: name of the data; ``data_hash`` of its queries, documents and labels.
        query_ids: one per query, in order.
        window: documents in one prompt; ``prompt_hash`` of the token ids of a fixed prompt.
        rows: the tokens that look: the query's text, or all from the instruction to the end.
        orders: prompts with another order of the documents that each query was averaged over.
        with_null: whether the null query "N/A" was measured too.
        seed: of the documents' orders.
        versions: of the packages involved.
    """

    model: ModelInfo
    data: str
    data_hash: str
    query_ids: tuple[str, ...]
    window: Window
    rows: Rows
    orders: int
    with_null: bool
    max_tokens_per_doc: int
    seed: int
    prompt_hash: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class QueryAttention:
    """One query's share of `HeadAttention`: float32 [documents, layers, heads] and [documents]."""

    query: np.ndarray
    null: np.ndarray | None
    tokens: np.ndarray
    positive: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """The attention every head paid to every document of labelled queries.

    Attributes:
        query: float32 [queries, documents, layers, heads]: attention mass of the document,
            averaged over the rows and summed over the document's tokens. Queries with fewer
            documents end in NaN.
        null: the same with the null query "N/A", or None where it was not measured.
        tokens: int32 [queries, documents]: document length in tokens, 0 for padding.
        positive: bool [queries, documents]: which documents answer the query.
        digest: of the store it was read from; "" where it was never stored.
    """

    query: np.ndarray
    null: np.ndarray | None
    tokens: np.ndarray
    positive: np.ndarray
    measurement: Measurement
    digest: str = ""

    @classmethod
    def of(
        cls,
        queries: Iterable[QueryAttention],
        documents: int,
        measurement: Measurement,
        digest: str = "",
    ) -> HeadAttention:
        """All queries of ``measurement`` side by side, padded to ``documents`` columns.

        ``queries`` are taken one at a time, so that they need not all be in memory twice.
        """
        import numpy as np

        model = measurement.model
        width = (len(measurement.query_ids), documents)
        shape = (*width, model.layers_kept, model.num_heads)
        gathered = cls(
            query=np.full(shape, np.nan, np.float32),
            null=np.full(shape, np.nan, np.float32) if measurement.with_null else None,
            tokens=np.zeros(width, np.int32),
            positive=np.zeros(width, bool),
            measurement=measurement,
            digest=digest,
        )
        for row, one in enumerate(queries):
            count = len(one.tokens)
            gathered.query[row, :count] = one.query
            if gathered.null is not None:
                gathered.null[row, :count] = one.null
            gathered.tokens[row, :count] = one.tokens
            gathered.positive[row, :count] = one.positive
        return gathered

    def each(self, layers: int) -> Iterator[QueryAttention]:
        """Query by query, without padding, the first ``layers``."""
        for row, tokens in enumerate(self.tokens):
            count = int((tokens > 0).sum())
            yield QueryAttention(
                self.query[row, :count, :layers],
                None if self.null is None else self.null[row, :count, :layers],
                tokens[:count],
                self.positive[row, :count],
            )

    def values(self, *, calibrated: bool, per_token: bool) -> np.ndarray:
        """float32 [queries, documents, layers, heads]: what a head says of a document.

        ``calibrated`` subtracts the null query's attention (the calibration of ICR, arXiv
        2410.02642); ``per_token`` divides by the document's length.
        """
        import numpy as np

        if calibrated and self.null is None:
            raise ValueError(
                "this attention was measured without the null query: measure it with the "
                "null query, or do not calibrate."
            )
        values = self.query - self.null if calibrated else self.query.copy()
        if per_token:
            values /= np.maximum(self.tokens, 1).astype(np.float32)[:, :, None, None]
        return values


def pool_attention(parts: Sequence[HeadAttention]) -> HeadAttention:
    """All queries of several measurements of one model, as if they were one.

    Where one read fewer layers than another, the layers that all have are kept. Query ids get the
    data's name before them.

    Raises:
        ValueError: the models, prompts or ways to measure differ, or two hold the same query.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0].measurement
    for name in ("model id", *_SAME):
        values = [_value(part.measurement, name) for part in parts]
        if any(value != values[0] for value in values):
            told = ", ".join(
                f"{p.measurement.data!r}: {v}" for p, v in zip(parts, values, strict=True)
            )
            raise ValueError(
                f"stores can only be pooled if they were measured alike, but {name} differs "
                f"({told})."
            )
    query_ids = [
        f"{part.measurement.data} {query_id}"
        for part in parts
        for query_id in part.measurement.query_ids
    ]
    twice = [query_id for query_id, count in Counter(query_ids).items() if count > 1]
    if twice:
        raise ValueError(f"query {twice[0]!r} is in two of the stores: give each query once.")
    layers = min(part.measurement.model.layers_kept for part in parts)
    measurement = replace(
        first,
        model=replace(first.model, layers_kept=layers),
        data=" + ".join(part.measurement.data for part in parts),
        data_hash=" ".join(part.measurement.data_hash for part in parts),
        query_ids=tuple(query_ids),
    )
    return HeadAttention.of(
        (one for part in parts for one in part.each(layers)),
        max(part.tokens.shape[1] for part in parts),
        measurement,
        " ".join(part.digest for part in parts),
    )


# A head set says one window, one kind of rows and one cut for all its data.
_SAME = ("prompt_hash", "window", "rows", "with_null", "max_tokens_per_doc")


def _value(measurement: Measurement, name: str) -> object:
    model = measurement.model
    if name == "model id":
        return model.name, model.num_layers, model.num_heads
    return getattr(measurement, name)
