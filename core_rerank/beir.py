"""Reads the corpus and the queries of a BEIR folder, with errors that name the file and line."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import DataError
from .rows import ENDINGS, numbered_rows, place, read_rows, text_of
from .types import Document

__all__ = [
    "CORPUS",
    "QUERIES",
    "CorpusFile",
    "find_rows",
    "read_corpus",
    "read_queries",
    "read_rows",
    "text_of",
]

CORPUS = "corpus.jsonl"
QUERIES = "queries.jsonl"


class CorpusFile:
    """The documents of a corpus on disk; every iteration streams them from the file again.

    A row is ``{"_id": ..., "text": ..., "title": ...}``; ids become text, a missing or empty title
    is None, and other keys become metadata (a mapping under ``metadata`` is merged into it). What
    stays in memory during an iteration is the ids, to find those that are there twice.
    """

    def __init__(self, path: str | Path) -> None:
        """``path`` is a .jsonl, .jsonl.gz or .parquet file, or a folder that holds ``corpus.*``.

        Raises:
            DataError: no such file.
        """
        self.path = _find(Path(path), CORPUS)

    def __iter__(self) -> Iterator[Document]:
        """All documents; see ``documents``."""
        return self.documents()

    def documents(self, wanted: Collection[str] | None = None) -> Iterator[Document]:
        """Documents in file order, each with its id; only those ``wanted``, if given.

        Raises:
            DataError: a line is malformed or one of these ids is there twice; names the lines.
        """
        lines: dict[str, int] = {}
        for number, row in numbered_rows(self.path):
            where = place(self.path, number)
            doc_id = _id(where, row)
            if wanted is not None and doc_id not in wanted:
                continue
            first = lines.setdefault(doc_id, number)
            if first != number:
                raise DataError(
                    f"{where}: document {doc_id!r} is there twice, first on "
                    f"{place(self.path, first).rpartition(', ')[2]}."
                )
            yield Document(text_of(where, row, "text"), doc_id, _title(where, row), _metadata(row))


def read_corpus(folder: Path, wanted: Collection[str] | None = None) -> dict[str, Document]:
    """Documents by id, in file order; only those ``wanted``, if given. Ids become text.

    Raises:
        DataError: the file is missing, a line is malformed, or a document is there twice.
    """
    documents = CorpusFile(folder).documents(wanted)
    return {str(document.doc_id): document for document in documents}


def read_queries(folder: Path) -> dict[str, str]:
    """Texts of the queries by id, in file order. Ids become text.

    Raises:
        DataError: the file is missing, a line is malformed, or a query is there twice.
    """
    texts: dict[str, str] = {}
    for where, row in read_rows(_find(Path(folder), QUERIES)):
        query_id = _id(where, row)
        if query_id in texts:
            raise DataError(f"{where}: query {query_id!r} is there twice.")
        texts[query_id] = text_of(where, row, "text")
    return texts


def find_rows(folder: Path, name: str) -> Path | None:
    """A folder's ``NAME.jsonl``, or else its ``NAME.jsonl.gz`` or ``NAME.parquet``; ``name`` is
    given as in `CORPUS`.
    """
    stem = name.removesuffix(ENDINGS[0])
    there = (folder / f"{stem}{ending}" for ending in ENDINGS)
    return next((file for file in there if file.is_file()), None)


def _find(path: Path, name: str) -> Path:
    """The file itself, or the one that ``find_rows`` finds in the folder."""
    if path.is_file():
        if not path.name.endswith(ENDINGS):
            raise DataError(f"{path} must end in {', '.join(ENDINGS)} to be read.")
        return path
    found = find_rows(path, name)
    if found is None:
        raise DataError(
            f"{path / name} is missing (so are .jsonl.gz and .parquet): expected a BEIR folder."
            if path.is_dir()
            else f"{path} is missing: expected a BEIR folder or a file of documents."
        )
    return found


def _id(where: str, row: Mapping[str, Any]) -> str:
    value = row.get("_id")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise DataError(f"{where}: '_id' must be text or a whole number, but is {value!r:.60}.")
    return str(value)


def _title(where: str, row: Mapping[str, Any]) -> str | None:
    return text_of(where, row, "title") or None if row.get("title") is not None else None


def _metadata(row: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: row[key] for key in row if key not in ("_id", "text", "title")}
    inner = rest.get("metadata")
    if isinstance(inner, Mapping):
        del rest["metadata"]
        rest = {**inner, **rest}
    return rest
