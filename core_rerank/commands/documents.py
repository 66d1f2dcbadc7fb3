"""Reads the documents that ``core-rerank rerank`` ranks: lines of text or of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from core_rerank.types import Document

from .terminal import CommandError

FORMATS = ("txt", "jsonl")
_BY_EXTENSION = {".txt": "txt", ".jsonl": "jsonl", ".ndjson": "jsonl"}


def read_documents(source: str, form: str | None = None) -> list[Document]:
    """Documents from a file, or from stdin for ``-``.

    txt: one document a line, its line number as id; blank lines are skipped. jsonl: one object
    a line with ``text`` and, if wanted, ``_id`` and ``title``; other keys become metadata.
    Without ``form`` the extension decides, or else the first line that is not blank.

    Raises:
        CommandError: the source cannot be read; a line is malformed (named); two ids are equal.
    """
    name = "stdin" if source == "-" else source
    lines = [line.removesuffix("\r") for line in _text(source, name).split("\n")]
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    form = form or _BY_EXTENSION.get(Path(source).suffix.lower()) or _sniff(numbered, name)
    if form == "txt":
        return [Document(line, doc_id=str(number)) for number, line in numbered]
    documents: dict[str | int, Document] = {}
    for number, line in numbered:
        document = _document(line, f"{name}, line {number}")
        key = number if document.doc_id is None else document.doc_id
        if key in documents:
            raise CommandError(f"{name}, line {number}: a second document with _id {key!r}.")
        documents[key] = document
    return list(documents.values())


def _text(source: str, name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except IsADirectoryError:
        raise CommandError(
            f"{source} is a folder: name a file of documents, or - for stdin."
        ) from None
    except OSError as error:
        raise CommandError(f"cannot read {source}: {error.strerror or error}.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise CommandError(f"{name}, line {line} is not UTF-8: save the file as UTF-8.") from None


def _sniff(numbered: list[tuple[int, str]], name: str) -> str:
    first = numbered[0][1].strip() if numbered else ""
    if first.startswith("["):
        try:
            json.loads("\n".join(line for _, line in numbered))
        except ValueError:
            return "txt"
        raise CommandError(
            f"{name} holds one JSON array; expected one JSON object a line. "
            "Convert it (for example with: jq -c '.[]'), or give --format txt."
        )
    return "jsonl" if first.startswith("{") else "txt"


def _document(line: str, where: str) -> Document:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise CommandError(f"{where} is not JSON: {error}.") from None
    if not isinstance(row, dict):
        raise CommandError(f"{where}: expected an object with 'text', not {line.strip():.60}")
    if "text" not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise CommandError(f"{where}: the key 'text' is missing; its keys: {keys:.60}.")
    text, title, doc_id = (row.pop(key, None) for key in ("text", "title", "_id"))
    if not isinstance(text, str):
        raise CommandError(f"{where}: 'text' must be a string, not {json.dumps(text):.60}.")
    if title is not None and not isinstance(title, str):
        raise CommandError(f"{where}: 'title' must be a string, not {json.dumps(title):.60}.")
    if isinstance(doc_id, int) and not isinstance(doc_id, bool):
        doc_id = str(doc_id)
    if doc_id is not None and not isinstance(doc_id, str):
        raise CommandError(f"{where}: '_id' must be a string, not {json.dumps(doc_id):.60}.")
    metadata: dict[str, Any] = row
    return Document(text, doc_id, title or None, metadata)
