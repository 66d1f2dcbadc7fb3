"""Streams rows from JSON lines (gzipped or not) and parquet; errors name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from .errors import DataError, MissingDependencyError

#: File endings that are read, in the order in which a folder is searched for them.
ENDINGS = (".jsonl", ".jsonl.gz", ".parquet")
_PARQUET_ROWS = 1024


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) for each row, blank lines left out; the place is for messages.

    One row (of parquet: one batch of rows) is in memory at a time.

    Raises:
        DataError: the file is missing or damaged, or a line is not a JSON object.
        MissingDependencyError: parquet without pyarrow.
    """
    for number, row in numbered_rows(path):
        yield place(path, number), row


def numbered_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like ``read_rows``, with the number of the line (parquet: of the row), from 1."""
    if not path.is_file():
        raise DataError(f"{path} is missing: give a BEIR folder that has it.")
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def place(path: Path, number: int) -> str:
    """How messages name a row."""
    return f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {number}"


def text_of(where: str, row: Mapping[str, Any], key: str) -> str:
    """The text under ``key``; DataError if there is none."""
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} must be text, but is {value!r:.60}.")
    return value


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(
                f"{place(path, number)} is not JSON in UTF-8: {error}. "
                "Expected one JSON object a line."
            ) from None
        if not isinstance(row, dict):
            raise DataError(
                f"{place(path, number)} is not a JSON object, but {type(row).__name__}: "
                "expected one object a line."
            )
        yield number, row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, start=1):
                yield number, line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} is damaged after line {number}: {error}. Compress or download it again."
        ) from None


def _open(path: Path) -> gzip.GzipFile | IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {path} needs pyarrow ({error}). "
            "To install it: pip install 'core-rerank[retrieval]'."
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} is damaged after row {number}: {error}. Write or download it again."
        ) from None
