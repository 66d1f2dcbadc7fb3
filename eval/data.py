"""Read a BEIR folder: corpus, queries and relevance judgements, with errors that name the line."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core_rerank.types import Document

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> relevance; 0 is judged and not relevant."""


class DataError(ValueError):
    """A data folder is incomplete or malformed; the message names the file and line."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split of a BEIR folder.

    Attributes:
        name: the folder's name and the split, such as ``"scifact/test"``.
        corpus: documents by id, in file order.
        queries: the judged queries' texts by id, in the order of the judgements.
        qrels: relevance by query id and document id.
    """

    name: str
    corpus: dict[str, Document]
    queries: dict[str, str]
    qrels: Qrels

    def first(self, limit: int | None) -> Dataset:
        """The same with the first ``limit`` queries only (None: all)."""
        if limit is None:
            return self
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number of at least 1, not {limit!r}.")
        kept = list(self.queries)[:limit]
        return Dataset(
            self.name,
            self.corpus,
            {query_id: self.queries[query_id] for query_id in kept},
            {query_id: self.qrels[query_id] for query_id in kept},
        )


def load_beir(folder: str | Path, split: str = "test") -> Dataset:
    """Read ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``. Ids are text everywhere.

    Queries without a judgement in the split are left out. A pair judged twice keeps the last
    judgement, with a warning. Judged documents need not be in the corpus (ArguAna has such).

    Raises:
        DataError: a file is missing, a line is malformed, an id is there twice, or a judged query
            has no text.
    """
    folder = Path(folder)
    qrels = _read_qrels(folder, split)
    corpus: dict[str, Document] = {}
    for where, row in _rows(folder / "corpus.jsonl"):
        document = Document(_text(where, row, "text"), _id(where, row), _title(where, row))
        if document.doc_id in corpus:
            raise DataError(f"{where}: document {document.doc_id!r} is there twice.")
        corpus[str(document.doc_id)] = document
    texts: dict[str, str] = {}
    for where, row in _rows(folder / "queries.jsonl"):
        query_id = _id(where, row)
        if query_id in texts:
            raise DataError(f"{where}: query {query_id!r} is there twice.")
        texts[query_id] = _text(where, row, "text")
    absent = [query_id for query_id in qrels if query_id not in texts]
    if absent:
        raise DataError(
            f"query {absent[0]!r} is judged in qrels/{split}.tsv but is not in "
            f"{folder / 'queries.jsonl'}."
        )
    name = f"{folder.resolve().name}/{split}"
    return Dataset(name, corpus, {query_id: texts[query_id] for query_id in qrels}, qrels)


def _read_qrels(folder: Path, split: str) -> Qrels:
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = sorted(p.stem for p in (folder / "qrels").glob("*.tsv"))
        raise DataError(
            f"{path} is missing. "
            + (f"Splits there are: {', '.join(there)}." if there else "Expected a BEIR folder.")
        )
    qrels: Qrels = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            cells = line.rstrip("\r\n").split("\t")
            if not line.strip() or (number == 1 and cells[-1] == "score"):
                continue
            if len(cells) != 3 or not cells[2].strip().lstrip("-").isdecimal():
                raise DataError(
                    f"{path}, line {number}: expected query-id, corpus-id and a whole number "
                    f"with tabs between, not {line.strip():.80}"
                )
            query_id, doc_id, score = cells
            judged = qrels.setdefault(query_id, {})
            if doc_id in judged:
                warnings.warn(
                    f"{path}, line {number}: query {query_id!r} and document {doc_id!r} were "
                    "judged before; the last judgement counts.",
                    stacklevel=3,
                )
            judged[doc_id] = int(score)
    if not qrels:
        raise DataError(f"{path} holds no judgements.")
    return qrels


def _id(where: str, row: dict[str, Any]) -> str:
    value = row.get("_id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"{where}: '_id' must be text or a whole number, but is {value!r:.60}.")
    return str(value)


def _title(where: str, row: dict[str, Any]) -> str | None:
    return _text(where, row, "title") or None if row.get("title") is not None else None


def _text(where: str, row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be text, but is {value!r:.60}.")
    return value


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for each line that is not blank; the place is for messages."""
    if not path.is_file():
        raise DataError(f"{path} is missing: expected a BEIR folder.")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{where} is not JSON: {error}.") from None
            if not isinstance(row, dict):
                raise DataError(f"{where} is not a JSON object: {line.strip():.60}")
            yield where, row
