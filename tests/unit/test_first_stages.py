"""The table of first stages: its rows, and one line for what cannot be done."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluations import DATA, beir_folder, run_file

from core_rerank.eval.first_stages import main, measure_first_stage
from core_rerank.retrievers import BM25Retriever, HybridRetriever


def test_a_table_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_file(tmp_path)
    assert main(["--data", str(beir_folder(tmp_path)), "bm25", f"run:{run}"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[1:5] for row in rows] == [
        ["bm25", "6", "1.0000", "1.0000"],
        [f"run:{run}", "6", "0.6309", "1.0000"],
    ]


def test_a_hybrid_shows_its_parts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = HybridRetriever([BM25Retriever(), BM25Retriever(k1=1.2)])
    monkeypatch.setattr("core_rerank.retrievers.make_retriever", lambda spec: hybrid)
    labels = [line.split(" | ")[1] for line in measure_first_stage(DATA, "hybrid")]
    assert labels == ["part of it: BM25Retriever"] * 2 + ["hybrid"]


def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--data", str(tmp_path), "bm25"]) == 2
    assert main(["--data", str(beir_folder(tmp_path)), "tfidf"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert second == "error: no retriever 'tfidf': expected bm25, dense, hybrid or run:FILE."
