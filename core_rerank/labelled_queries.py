"""Queries with known answers, read from a BEIR folder: what head detection learns from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CoreRerankError
from .types import DocId, Document

CANDIDATES = "candidates.jsonl"
CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"


class LabelledDataError(CoreRerankError, ValueError):
    """The data folder is incomplete or malformed; the message names the file and line."""


@dataclass(frozen=True, slots=True)
class LabelledQuery:
    """A query, the documents that answer it, and hard negatives: near misses that do not."""

    query_id: str
    query: str
    positives: tuple[Document, ...]
    negatives: tuple[Document, ...]


def load_labelled_queries(folder: str | Path, limit: int | None = None) -> list[LabelledQuery]:
    """Read a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` and ``candidates.jsonl``.

    A row of ``candidates.jsonl`` is ``{"query-id": ..., "positives": [ids], "negatives": [ids]}``;
    its order is kept, and ``limit`` takes the first rows. The order of the ids does not matter.

    Raises:
        LabelledDataError: a file is missing or a line is malformed; a query or document named
            there does not exist or is blank; a query has no positives or no negatives; a document
            is both.
    """
    folder = Path(folder)
    missing = [name for name in (CORPUS, QUERIES, CANDIDATES) if not (folder / name).is_file()]
    if missing:
        raise LabelledDataError(
            f"{folder} lacks {', '.join(missing)}: head detection needs a BEIR folder with "
            f'{CORPUS}, {QUERIES} and {CANDIDATES} (rows {{"query-id", "positives", "negatives"}}).'
        )
    if limit is not None and (isinstance(limit, bool) or limit < 1):
        raise LabelledDataError(f"limit must be at least 1, not {limit!r}.")
    rows = []
    for where, row in _rows(folder / CANDIDATES):
        rows.append((where, _candidates(where, row)))
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise LabelledDataError(f"{folder / CANDIDATES} is empty: no labelled queries.")
    wanted = {doc_id for _, (_, pos, neg) in rows for doc_id in (*pos, *neg)}
    documents = {
        document.doc_id: document
        for where, row in _rows(folder / CORPUS)
        if (document := _document(where, row)).doc_id in wanted
    }
    texts = {_text(w, row, "_id"): _text(w, row, "text") for w, row in _rows(folder / QUERIES)}
    return [_labelled(where, row, texts, documents) for where, row in rows]


def _labelled(
    where: str,
    row: tuple[str, list[str], list[str]],
    texts: Mapping[str, str],
    documents: Mapping[DocId | None, Document],
) -> LabelledQuery:
    query_id, positives, negatives = row
    if not texts.get(query_id, "").strip():
        raise LabelledDataError(f"{where}: query {query_id!r} has no text in {QUERIES}.")
    for kind, ids in (("positive", positives), ("negative", negatives)):
        absent = [doc_id for doc_id in ids if doc_id not in documents]
        if absent:
            raise LabelledDataError(
                f"{where}: {kind} {absent[0]!r} of query {query_id!r} is not in {CORPUS}."
            )
        blank = [doc_id for doc_id in ids if not documents[doc_id].full_text.strip()]
        if blank:
            raise LabelledDataError(
                f"{where}: {kind} {blank[0]!r} of query {query_id!r} has no text in {CORPUS}."
            )
    return LabelledQuery(
        query_id,
        texts[query_id],
        tuple(documents[i] for i in positives),
        tuple(documents[i] for i in negatives),
    )


def _candidates(where: str, row: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    query_id = _text(where, row, "query-id")
    lists = []
    for key in ("positives", "negatives"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise LabelledDataError(f"{where}: {key!r} must be a list of document ids.")
        if not ids:
            raise LabelledDataError(
                f"{where}: query {query_id!r} has no {key}. A contrastive score needs at least "
                "one document that answers the query and one hard negative that does not."
            )
        lists.append(list(dict.fromkeys(ids)))
    both = set(lists[0]) & set(lists[1])
    if both:
        raise LabelledDataError(f"{where}: {min(both)!r} is both a positive and a negative.")
    return query_id, lists[0], lists[1]


def _document(where: str, row: Mapping[str, Any]) -> Document:
    title = row.get("title")
    if title is not None and not isinstance(title, str):
        raise LabelledDataError(f"{where}: 'title' must be text, not {type(title).__name__}.")
    return Document(_text(where, row, "text"), _text(where, row, "_id"), title or None)


def _text(where: str, row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise LabelledDataError(f"{where}: {key!r} must be text, but is {value!r:.60}.")
    return value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for each line that is not blank; the place is for messages."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise LabelledDataError(f"{where} is not JSON in UTF-8: {error}.") from None
            if not isinstance(row, dict):
                raise LabelledDataError(f"{where} is not a JSON object, but {type(row).__name__}.")
            yield where, row
