"""The values that flow through a rerank: documents in, a ranking out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, overload

DocId = str | int
Explain = bool | Literal["heads"]
"""What a ranking explains: nothing, every token, or every token by head too."""
Screening = bool | Literal["flag", "drop"]
"""What happens to suspicious documents: nothing, a mark (True is "flag"), or they are left out."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to rank; ``title`` is put before the text, ``metadata`` is carried along untouched."""

    text: str
    doc_id: DocId | None = None
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def full_text(self) -> str:
        """What the model reads: title, a line break and the text, or the text alone."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Calibrated attention one document token received.

    ``start`` and ``end`` are character offsets (half-open) into ``Document.full_text`` and
    ``text`` is what lies between them; tokens that are pieces of one character (an emoji's bytes)
    all have that character's offsets. ``score`` is what the token adds to the document's score
    before the token filter; ``kept`` is False where the filter left the token out.
    """

    text: str
    start: int
    end: int
    score: float
    kept: bool = True


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """One document of a ranking.

    Attributes:
        index: its place in the caller's list, from 0.
        doc_id: the caller's id, type kept, or None.
        score: calibrated attention; higher is better. Comparable within one ranking only.
        rank: from 1.
        document: the document as given (strings are wrapped).
        truncated: the model read only the document's beginning.
        blank: the document had no text; it ranks last.
        token_scores: per token, when ``explain`` is True or "heads".
        head_scores: with ``explain="heads"``, by head (``"18-7"``), what each token of
            ``token_scores`` earned from it: its attention times its weight, before calibration.
            Where nothing is calibrated, their sum over the heads is the token's score.
        injection: with ``screen``, how suspicious the document is of holding orders for the
            model, in [0, 1]; None without, and for blank documents.
        flagged: ``injection`` lies above the threshold.
    """

    index: int
    doc_id: DocId | None
    score: float
    rank: int
    document: Document
    truncated: bool = False
    blank: bool = False
    token_scores: tuple[TokenScore, ...] | None = None
    head_scores: Mapping[str, tuple[float, ...]] | None = field(default=None, hash=False)
    injection: float | None = None
    flagged: bool = False


@dataclass(frozen=True, slots=True)
class Ranking(Sequence[RankedDocument]):
    """Documents from best to worst; an immutable sequence.

    ``prompt_tokens`` counts the tokens of the prompts that asked the query; ``dropped`` are the
    documents, by place in the caller's list, that ``screen="drop"`` left out.
    """

    query: str
    documents: tuple[RankedDocument, ...]
    model: str
    strategy: str
    prompt_tokens: int = field(default=0, compare=False)
    dropped: tuple[int, ...] = ()

    @overload
    def __getitem__(self, index: int) -> RankedDocument: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankedDocument, ...]: ...
    def __getitem__(self, index: int | slice) -> RankedDocument | tuple[RankedDocument, ...]:
        return self.documents[index]

    def __len__(self) -> int:
        return len(self.documents)

    def __iter__(self) -> Iterator[RankedDocument]:
        return iter(self.documents)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe copy: plain dicts, lists, strings, finite numbers, booleans and None.

        In metadata, mappings become dicts with string keys, other collections lists, numpy
        scalars and arrays plain numbers and lists; anything else, NaN and infinity included, is
        written as ``str`` writes it. ``head_scores``, ``injection``, ``flagged`` and ``dropped``
        are there where they were asked for.
        """
        return {
            "query": self.query,
            "model": self.model,
            "strategy": self.strategy,
            "documents": [_ranked_dict(document) for document in self.documents],
            **({"dropped": list(self.dropped)} if self.dropped else {}),
        }

    def to_html(self) -> str:
        """One self-contained page: each document's tokens shaded by the attention they received."""
        from .html import render

        return render(self)


def _ranked_dict(item: RankedDocument) -> dict[str, Any]:
    tokens = item.token_scores
    by_head = item.head_scores
    heads = {} if by_head is None else {"head_scores": {h: list(s) for h, s in by_head.items()}}
    screened = {"injection": item.injection, "flagged": item.flagged}
    return {
        "rank": item.rank,
        "index": item.index,
        "doc_id": item.doc_id,
        "score": item.score,
        "title": item.document.title,
        "text": item.document.text,
        "metadata": _plain(item.document.metadata),
        "truncated": item.truncated,
        "blank": item.blank,
        "token_scores": None if tokens is None else [_token_dict(token) for token in tokens],
        **heads,
        **(screened if item.injection is not None else {}),
    }


def _token_dict(token: TokenScore) -> dict[str, Any]:
    return {
        "text": token.text,
        "start": token.start,
        "end": token.end,
        "score": token.score,
        "kept": token.kept,
    }


def _plain(value: Any) -> Any:
    """``value`` in the types of JSON; see ``Ranking.to_dict``."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | Set) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    return str(value)
