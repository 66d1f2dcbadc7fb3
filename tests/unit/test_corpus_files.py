"""Corpora on disk: three formats, one stream, ids, duplicates, and the line that an error names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from core_rerank.beir import CorpusFile, read_corpus, read_queries
from core_rerank.errors import DataError
from core_rerank.retrievers.corpus import CorpusPass, fingerprint
from core_rerank.types import Document

ROWS: list[dict[str, Any]] = [
    {"_id": "a", "title": "Lava", "text": "It flows."},
    {"_id": 7, "title": "", "text": "Seven", "metadata": {"year": 1990}, "source": "book"},
]
DOCUMENTS = [
    Document("It flows.", "a", "Lava"),
    Document("Seven", "7", None, {"year": 1990, "source": "book"}),
]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder: Path, ending: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"corpus{ending}"
    if ending == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif ending == ".jsonl.gz":
        path.write_bytes(gzip.compress(lines(rows)))
    else:
        path.write_bytes(lines(rows))
    return path


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_a_file_and_its_folder_stream_again_and_again(ending: str, tmp_path: Path) -> None:
    corpus = CorpusFile(write(tmp_path, ending, ROWS))
    assert list(corpus) == DOCUMENTS
    assert list(corpus) == DOCUMENTS
    assert read_corpus(tmp_path) == {"a": DOCUMENTS[0], "7": DOCUMENTS[1]}


def test_parquet_gives_the_same_documents(tmp_path: Path) -> None:
    # A column has one type, so ids that are numbers are numbers throughout.
    rows = [{"_id": 6, "title": None, "text": "six"}, {"_id": 7, "title": "T", "text": "seven"}]
    write(tmp_path, ".parquet", rows)
    assert list(CorpusFile(tmp_path)) == [Document("six", "6"), Document("seven", "7", "T")]


def test_parquet_spans_batches(tmp_path: Path) -> None:
    rows = [{"_id": f"d{number}", "text": "x"} for number in range(2500)]
    path = write(tmp_path, ".parquet", rows)
    assert [document.doc_id for document in CorpusFile(path)] == [row["_id"] for row in rows]
    write(tmp_path, ".parquet", [*rows, rows[3]])
    with pytest.raises(DataError, match=r"row 2501: document 'd3' is there twice, first on row 4"):
        list(CorpusFile(path))


def test_queries_may_be_compressed_too(tmp_path: Path) -> None:
    (tmp_path / "queries.jsonl.gz").write_bytes(gzip.compress(b'{"_id": 1, "text": "why?"}\n'))
    assert read_queries(tmp_path) == {"1": "why?"}


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz"])
def test_an_id_that_is_there_twice_is_refused_with_both_lines(ending: str, tmp_path: Path) -> None:
    path = write(tmp_path, ending, [*ROWS, {"_id": "7", "text": "text, not a number"}])
    with pytest.raises(DataError, match=rf"{ending}, line 3: document '7'.*first on line 2"):
        list(CorpusFile(path))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 2 is not JSON in UTF-8"),
        (b'{"_id": "b", "text": "\xff"}', "line 2 is not JSON in UTF-8"),
        (b'["b"]', "line 2 is not a JSON object, but list"),
        (b'{"text": "x"}', "line 2: '_id' must be text or a whole number, but is None"),
        (b'{"_id": "", "text": "x"}', "line 2: '_id' must be text or a whole number, but is ''"),
        (b'{"_id": true, "text": "x"}', "line 2: '_id' must be"),
        (b'{"_id": "b"}', "line 2: 'text' must be text, but is None"),
    ],
)
def test_a_bad_line_is_named(line: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b'{"_id": "a", "text": "x"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(CorpusFile(path))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(lines([{"_id": str(n), "text": "x" * n} for n in range(500)]))
    cut = tmp_path / "corpus.jsonl.gz"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"corpus\.jsonl\.gz is damaged after line \d+"):
        list(CorpusFile(cut))
    cut.write_bytes(b"no gzip at all\n")
    with pytest.raises(DataError, match="is damaged after line 0"):
        list(CorpusFile(cut))
    table = tmp_path / "corpus.parquet"
    table.write_bytes(b"PAR1 no parquet PAR1")
    with pytest.raises(DataError, match=r"corpus\.parquet is damaged after row 0"):
        list(CorpusFile(table))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl is missing \(so are"):
        CorpusFile(tmp_path)
    with pytest.raises(DataError, match="nowhere is missing"):
        CorpusFile(tmp_path / "nowhere")
    (tmp_path / "corpus.csv").touch()
    with pytest.raises(DataError, match=r"must end in \.jsonl, \.jsonl\.gz, \.parquet"):
        CorpusFile(tmp_path / "corpus.csv")


def test_a_corpus_is_known_by_ids_titles_texts_and_order(tmp_path: Path) -> None:
    write(tmp_path, ".jsonl.gz", ROWS)
    mapping = {str(document.doc_id): document for document in DOCUMENTS}
    same = fingerprint(CorpusFile(tmp_path))
    assert same.documents == 2
    assert fingerprint(mapping) == fingerprint(DOCUMENTS) == same
    others = [
        DOCUMENTS[::-1],
        DOCUMENTS[:1],
        [DOCUMENTS[0], Document("Seven!", "7")],
        [DOCUMENTS[0], Document("Seven", "8")],
        [Document("It flows.", "a", "lava"), DOCUMENTS[1]],
        [Document("Lava It flows.", "a"), DOCUMENTS[1]],
    ]
    assert len({fingerprint(other).sha256 for other in others} | {same.sha256}) == 7


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        ([], "the corpus is empty"),
        ({}, "the corpus is empty"),
        ([Document("x")], "document 1 of the corpus has the id None"),
        ([Document("x", "1"), Document("y", 1)], "documents 1 and 2 have the same id '1'"),
        ({"": Document("x")}, "document 1 of the corpus has the id ''"),
    ],
)
def test_corpora_in_memory_are_checked_too(corpus: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(CorpusPass(corpus))


def test_progress_is_shown_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    list(CorpusPass(DOCUMENTS, "reading them", progress=True))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "reading them: 100%" in shown.err
