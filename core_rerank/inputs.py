"""The input contract: what a caller may pass, checked before the model sees any of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from .errors import NotFiniteError
from .types import DocId, Document


@dataclass(frozen=True, slots=True)
class RerankInput:
    """One checked rerank: a query with text, documents, and an id or None for each.

    ``max_tokens_per_doc`` is what this rerank asks for below the reranker's own limit.
    """

    query: str
    documents: tuple[Document, ...]
    doc_ids: tuple[DocId | None, ...]
    max_tokens_per_doc: int | None = None


def check_input(
    query: Any, documents: Any, doc_ids: Any = None, max_tokens_per_doc: Any = None
) -> RerankInput:
    """Check one rerank's arguments; ``doc_ids`` win over the documents' own ids.

    Raises:
        TypeError: the query is not a string, or ``documents`` is not an iterable of strings and
            ``Document``s; names the place and the type found.
        ValueError: the query is blank, there are too few, too many or equal ids, or
            ``max_tokens_per_doc`` is no count from 1.
    """
    if not isinstance(query, str):
        raise TypeError(f"query must be a string, not {_kind(query)}.")
    if not query.strip():
        raise ValueError(f"query is blank: {query!r}. Give a query with text.")
    items = _items(documents, "documents", "strings or Documents")
    checked = tuple(_document(index, item) for index, item in enumerate(items))
    if doc_ids is None:
        ids = tuple(document.doc_id for document in checked)
    else:
        ids = tuple(_items(doc_ids, "doc_ids", "ids"))
        if len(ids) != len(checked):
            raise ValueError(
                f"doc_ids has {len(ids)} ids for {len(checked)} documents: give one for each."
            )
        checked = tuple(
            Document(item, doc_id=doc_id) if isinstance(item, str) else item
            for item, doc_id in zip(items, ids, strict=True)
        )
    _check_ids(ids, may_be_none=doc_ids is None)
    cut = max_tokens_per_doc
    cut = None if cut is None else check_count("max_tokens_per_doc", cut)
    return RerankInput(query, checked, ids, cut)


def check_count(name: str, value: Any, otherwise: str = "") -> int:
    """``value`` as an int from 1; a ValueError that calls it ``name`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1{otherwise}, not {value!r}.")
    return int(value)


def check_top_n(top_n: Any) -> int | None:
    """``top_n`` as an int from 1, or None for all documents; ValueError otherwise."""
    return None if top_n is None else check_count("top_n", top_n, ", or None for all documents")


def _items(values: Any, name: str, what: str) -> list[Any]:
    if isinstance(values, str | bytes | Mapping | Document) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {what}, not {_kind(values)}.")
    return list(values)


def _document(index: int, item: Any) -> Document:
    if isinstance(item, str):
        return Document(item)
    if not isinstance(item, Document):
        raise TypeError(
            f"document {index} is {_kind(item)}: expected a string or a core_rerank.Document."
        )
    if not isinstance(item.text, str):
        raise TypeError(f"document {index} has a text of type {_kind(item.text)}, not a string.")
    if item.title is not None and not isinstance(item.title, str):
        raise TypeError(f"document {index} has a title of type {_kind(item.title)}, not a string.")
    return item


def _check_ids(ids: Iterable[Any], *, may_be_none: bool) -> None:
    first: dict[DocId, int] = {}
    for index, doc_id in enumerate(ids):
        if doc_id is None and may_be_none:
            continue
        if not isinstance(doc_id, str | int) or isinstance(doc_id, bool):
            raise TypeError(f"the id of document {index} is {_kind(doc_id)}: expected str or int.")
        if doc_id in first:
            raise ValueError(
                f"documents {first[doc_id]} and {index} have the same id {doc_id!r}: ids must "
                "differ, or be left out."
            )
        first[doc_id] = index


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def check_tasks(tasks: Iterable[tuple[Any, Any]]) -> list[RerankInput]:
    """Check the (query, documents) pairs of a batch; errors as ``check_input``, noting which."""
    checked = []
    for number, task in enumerate(tasks):
        if not isinstance(task, tuple | list) or len(task) != 2:
            raise TypeError(f"task {number} is not a (query, documents) pair: {task!r:.80}.")
        with naming_task(number):
            checked.append(check_input(*task))
    return checked


@contextmanager
def naming_task(number: int, of: int = 2) -> Iterator[None]:
    """Note on an error which task of a batch it belongs to; a batch of one needs no note."""
    try:
        yield
    except (TypeError, ValueError, NotFiniteError) as error:
        if of > 1:
            error.add_note(f"in task {number} of the batch")
        raise
