"""Goes through a corpus once, checking the ids and hashing what goes by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from core_rerank.beir import CorpusFile
from core_rerank.types import Document

Corpus = Mapping[str, Document] | Iterable[Document]
"""Documents by id, or documents that carry their ids; a ``CorpusFile`` streams from disk."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a corpus is: how many documents, and a hash of their ids, titles and texts in order."""

    documents: int
    sha256: str


class CorpusPass:
    """One pass over a corpus; ``fingerprint()`` once it is over.

    Iterating gives (id, document); ids are text, and of documents that carry a whole number as id
    its digits.
    """

    def __init__(self, corpus: Corpus, label: str = "reading", *, progress: bool = False) -> None:
        """``label`` names the bar that ``progress`` shows on stderr."""
        self._corpus = corpus
        self._label = label
        self._progress = progress
        self._digest = hashlib.sha256()
        self._documents = 0

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        """(id, document), in the corpus's order.

        Raises:
            DataError: a line of a ``CorpusFile`` is malformed, or an id is there twice.
            ValueError: a document has no id, an id is there twice, or there are no documents.
        """
        from tqdm import tqdm

        pairs = _pairs(self._corpus)
        total = len(self._corpus) if isinstance(self._corpus, Mapping | list | tuple) else None
        bar = tqdm(
            pairs, desc=self._label, unit="document", total=total, disable=not self._progress
        )
        for doc_id, document in bar:
            record = json.dumps([doc_id, document.title or "", document.text])
            self._digest.update(record.encode("ascii") + b"\n")
            self._documents += 1
            yield doc_id, document
        if not self._documents:
            raise ValueError("the corpus is empty: expected at least one document.")

    def fingerprint(self) -> Fingerprint:
        """What went by; of the corpus only if the iteration came to its end."""
        return Fingerprint(self._documents, self._digest.hexdigest())


def fingerprint(corpus: Corpus, *, progress: bool = False) -> Fingerprint:
    """Read a corpus through and say what it is."""
    reading = CorpusPass(corpus, "checking the corpus", progress=progress)
    for _ in reading:
        pass
    return reading.fingerprint()


def searchable_text(document: Document) -> str:
    """Title and text with a space between, as BEIR joins them."""
    return f"{document.title or ''} {document.text}".strip()


def _pairs(corpus: Corpus) -> Iterator[tuple[str, Document]]:
    if isinstance(corpus, CorpusFile):
        return ((str(document.doc_id), document) for document in corpus)
    if isinstance(corpus, Mapping):
        return _checked(cast("Mapping[str, Document]", corpus).items())
    return _checked((document.doc_id, document) for document in corpus)


def _checked(pairs: Iterable[tuple[str | int | None, Document]]) -> Iterator[tuple[str, Document]]:
    numbers: dict[str, int] = {}
    for number, (doc_id, document) in enumerate(pairs, start=1):
        if isinstance(doc_id, bool) or not isinstance(doc_id, str | int) or doc_id == "":
            raise ValueError(
                f"document {number} of the corpus has the id {doc_id!r}: expected text, "
                "such as Document(text, doc_id='d1')."
            )
        first = numbers.setdefault(str(doc_id), number)
        if first != number:
            raise ValueError(f"documents {first} and {number} have the same id {str(doc_id)!r}.")
        yield str(doc_id), document
