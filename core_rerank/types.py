"""The values that flow through a rerank: documents in, a ranking out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload


@dataclass(frozen=True, slots=True)
class Document:
    """A text to rank; ``title`` is put before the text, ``metadata`` is carried along untouched."""

    text: str
    doc_id: str | None = None
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def full_text(self) -> str:
        """What the model reads: title, a line break and the text, or the text alone."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Calibrated attention one document token received.

    ``start`` and ``end`` are character offsets (half-open) into ``Document.full_text``; ``score``
    is what the token adds to the document's score before the token filter; ``kept`` is False
    where the filter left the token out.
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
        doc_id: the caller's id, or None.
        score: calibrated attention; higher is better. Comparable within one ranking only.
        rank: from 1.
        document: the document as given (strings are wrapped).
        truncated: the model read only the document's beginning.
        blank: the document had no text; it ranks last.
        token_scores: per token, when ``explain=True``.
    """

    index: int
    doc_id: str | None
    score: float
    rank: int
    document: Document
    truncated: bool = False
    blank: bool = False
    token_scores: tuple[TokenScore, ...] | None = None


@dataclass(frozen=True, slots=True)
class Ranking(Sequence[RankedDocument]):
    """Documents from best to worst; an immutable sequence."""

    query: str
    documents: tuple[RankedDocument, ...]
    model: str
    strategy: str

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
        """A JSON-safe copy: plain dicts, lists, strings, numbers, booleans and None."""
        raise NotImplementedError

    def to_html(self) -> str:
        """One self-contained page: each document's tokens shaded by the attention they received."""
        from .html import render

        return render(self)
