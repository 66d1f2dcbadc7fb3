"""Reads the corpus and the queries of a BEIR folder, with errors that name the file and line."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import DataError
from .types import Document

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"


def read_corpus(folder: Path, wanted: Collection[str] | None = None) -> dict[str, Document]:
    """Documents by id, in file order; only those ``wanted``, if given. Ids become text.

    Raises:
        DataError: the file is missing, a line is malformed, or a document is there twice.
    """
    documents: dict[str, Document] = {}
    for where, row in read_rows(folder / CORPUS):
        doc_id = _id(where, row)
        document = Document(text_of(where, row, "text"), doc_id, _title(where, row))
        if wanted is not None and doc_id not in wanted:
            continue
        if doc_id in documents:
            raise DataError(f"{where}: document {doc_id!r} is there twice.")
        documents[doc_id] = document
    return documents


def read_queries(folder: Path) -> dict[str, str]:
    """Texts of the queries by id, in file order. Ids become text.

    Raises:
        DataError: the file is missing, a line is malformed, or a query is there twice.
    """
    texts: dict[str, str] = {}
    for where, row in read_rows(folder / QUERIES):
        query_id = _id(where, row)
        if query_id in texts:
            raise DataError(f"{where}: query {query_id!r} is there twice.")
        texts[query_id] = text_of(where, row, "text")
    return texts


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for each line that is not blank; the place is for messages."""
    if not path.is_file():
        raise DataError(f"{path} is missing: expected a BEIR folder.")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON in UTF-8: {error}.") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object, but {type(row).__name__}.")
            yield where, row


def text_of(where: str, row: Mapping[str, Any], key: str) -> str:
    """The text under ``key``; DataError if there is none."""
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be text, but is {value!r:.60}.")
    return value


def _id(where: str, row: Mapping[str, Any]) -> str:
    value = row.get("_id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: '_id' must be text or a whole number, but is {value!r:.60}.")
    return str(value)


def _title(where: str, row: Mapping[str, Any]) -> str | None:
    return text_of(where, row, "title") or None if row.get("title") is not None else None
