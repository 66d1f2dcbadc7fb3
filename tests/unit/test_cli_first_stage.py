"""``core-rerank index`` and ``search`` on a corpus of three documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from core_rerank.cli import app

ROWS = [
    {"_id": "a", "text": "Volcanoes erupt ash and lava."},
    {"_id": "b", "title": "Sourdough", "text": "Bread bakes."},
    {"_id": "c", "text": "Lava, lava, lava."},
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_an_index_is_built_once_and_searched(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    assert run("index", corpus, folder).exit_code == 0
    written = (folder / "index.json").stat().st_mtime_ns
    assert run("index", corpus, folder).exit_code == 0
    assert (folder / "index.json").stat().st_mtime_ns == written
    lines = [line.split() for line in run("search", folder, "lava").stdout.splitlines()]
    assert [line[:4] for line in lines] == [["query", "Q0", "c", "1"], ["query", "Q0", "a", "2"]]
    queries = tmp_path / "queries.jsonl"
    queries.write_text('{"_id": "q1", "text": "bread"}\n{"_id": "q2", "text": "lava"}\n')
    out = tmp_path / "run.trec"
    found = run("search", folder, "--queries", queries, "--depth", 1, "--out", out)
    assert (found.exit_code, found.stdout) == (0, "")
    assert [line.split()[:3] for line in out.read_text().splitlines()] == [
        ["q1", "Q0", "b"],
        ["q2", "Q0", "c"],
    ]


def test_what_cannot_be_done_is_one_line(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    run("index", corpus, folder)
    for arguments, message in (
        (("index", corpus, folder, "--language", "de"), "language='auto', not"),
        (("index", corpus, folder, "--language", "xx"), "no language 'xx'"),
        (("index", corpus, folder, "--vector-index", "ivf"), "has no option 'vector_index'"),
        (("index", tmp_path / "nowhere", folder), "nowhere is missing"),
        (("search", tmp_path, "lava"), "it is no index"),
        (("search", folder), "give either a QUERY or --queries"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr
