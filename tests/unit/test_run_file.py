"""Run files: forms, order of ties, malformed lines, and the retriever that gives them back."""

from __future__ import annotations

from pathlib import Path

import pytest

from core_rerank.errors import DataError, IndexFolderError
from core_rerank.retrievers import RunFileRetriever, load_retriever, read_run, run_lines
from core_rerank.types import Document

TREC = """\
q1 Q0 b 2 1.5 bm25
q1 Q0 a 1 3 bm25
q2 Q0 c 1 -0.25 bm25
"""
CORPUS = {name: Document(name, name) for name in "abc"}


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.trec"
    path.write_bytes(text.encode())
    return path


def test_trec_runs_are_read_best_first(tmp_path: Path) -> None:
    run = read_run(run_file(tmp_path, TREC))
    assert run == {"q1": {"a": 3.0, "b": 1.5}, "q2": {"c": -0.25}}
    assert list(run["q1"]) == ["a", "b"]


def test_tables_with_tabs_are_read_too(tmp_path: Path) -> None:
    text = "\ufeffquery-id\tcorpus-id\trank\tscore\r\nq\td 1\t1\t10.5\r\nq\td2\t2\t9.5\r\n"
    assert read_run(run_file(tmp_path, text)) == {"q": {"d 1": 10.5, "d2": 9.5}}
    assert read_run(run_file(tmp_path, "q\tx\t2\nq\ty\t1\n")) == {"q": {"y": 1.0, "x": 0.5}}


def test_document_ids_may_hold_blanks(tmp_path: Path) -> None:
    text = "q Q0 law - 민법.pdf - 1 1 2.5 tag\nq\tQ0\tplain\t2\t1.5\ttag\n"
    assert list(read_run(run_file(tmp_path, text))["q"]) == ["law - 민법.pdf - 1", "plain"]


def test_equal_scores_keep_the_rank_column_then_the_line(tmp_path: Path) -> None:
    rows = [("z", 3, 1.0), ("a", 3, 1.0), ("m", 1, 1.0), ("k", 9, 2.0)]
    text = "".join(f"q Q0 {doc} {rank} {score} t\n" for doc, rank, score in rows)
    assert list(read_run(run_file(tmp_path, text))["q"]) == ["k", "m", "z", "a"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q1 Q0 c 3 1.0", "line 4: expected 'query Q0 document rank score tag'"),
        ("q1", "line 4: expected"),
        ("q1 Q0 c third 1.0 t", "line 4: the rank must be a whole number, but is 'third'"),
        ("q1 Q0 c -1 1.0 t", "line 4: the rank must be"),
        ("q1 Q0 c 3 high t", "line 4: the score must be a finite number, but is 'high'"),
        ("q1 Q0 c 3 nan t", "line 4: the score must be a finite number"),
        ("q1 Q0 c 3 inf t", "line 4: the score must be a finite number"),
        ("q1 Q0 b 3 1.0 t", "line 4: query 'q1' has document 'b' twice, first on line 1"),
        ("q1\tc\t0", "line 4: ranks without scores must start at 1"),
    ],
)
def test_malformed_lines_are_named(line: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_run(run_file(tmp_path, TREC + line + "\n"))


def test_files_that_are_no_runs_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nosuch is missing: expected a TREC run"):
        read_run(tmp_path / "nosuch")
    with pytest.raises(
        DataError, match=r"run\.trec holds no ranking: .* Run the first stage again"
    ):
        read_run(run_file(tmp_path, "\n"))
    (tmp_path / "run.trec").write_bytes(b"q Q0 a 1 1 t\nq Q0 \xff 2 1 t\n")
    with pytest.raises(DataError, match="line 2 is not UTF-8"):
        read_run(tmp_path / "run.trec")


def test_what_is_written_is_read_again_in_the_same_order(tmp_path: Path) -> None:
    run = {"q": {"b c": 1 + 1e-12, "a": 1.0, "d": -0.5}, "none": {}}
    text = "".join(f"{line}\n" for line in run_lines(run, "tag"))
    assert text.splitlines()[0] == "q Q0 b c 1 1 tag"
    assert list(read_run(run_file(tmp_path, text))["q"]) == ["b c", "a", "d"]


def test_queries_get_their_rankings_and_depth_cuts(tmp_path: Path) -> None:
    retriever = RunFileRetriever(run_file(tmp_path, TREC))
    retriever.index(CORPUS)
    assert retriever.search({"q9": "?", "q1": "?"}, 1) == {"q9": {}, "q1": {"a": 3.0}}
    assert retriever.search({}, 1) == {}
    with pytest.raises(DataError, match=r"none of the 1 queries: it holds 'q1' and 1 others"):
        retriever.search({"x": "?"}, 1)
    with pytest.raises(ValueError, match="depth must be"):
        retriever.search({"q1": "?"}, 0)


def test_a_document_that_the_corpus_lacks_is_named(tmp_path: Path) -> None:
    retriever = RunFileRetriever(run_file(tmp_path, TREC))
    with pytest.raises(DataError, match=r"line 1: document 'b' is not in the corpus of 2"):
        retriever.index([Document("", "a"), Document("", "c")])


def test_saving_keeps_a_copy_for_this_corpus(tmp_path: Path) -> None:
    retriever = RunFileRetriever(run_file(tmp_path, TREC))
    with pytest.raises(RuntimeError, match="before index"):
        retriever.save(tmp_path / "index")
    retriever.index(CORPUS)
    retriever.save(tmp_path / "index")
    loaded = load_retriever(tmp_path / "index", CORPUS)
    assert loaded.search({"q1": "?"}, 5) == retriever.search({"q1": "?"}, 5)
    with pytest.raises(IndexFolderError, match="another corpus"):
        RunFileRetriever.load(tmp_path / "index", {**CORPUS, "d": Document("d", "d")})
    retriever.restore(tmp_path / "index", CORPUS)
    other = RunFileRetriever(run_file(tmp_path, TREC.replace("1.5", "1.25")))
    with pytest.raises(IndexFolderError, match="was built with sha256="):
        other.restore(tmp_path / "index")
    with pytest.raises(IndexFolderError, match="has changed since it was read"):
        retriever.save(tmp_path / "index")
    (tmp_path / "index" / "run.trec").unlink()
    with pytest.raises(IndexFolderError, match="the index is damaged"):
        RunFileRetriever.load(tmp_path / "index")
