"""What the command line reads and writes: documents, files, and where output goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_rerank.commands.documents import read_documents
from core_rerank.commands.terminal import CommandError, write_text
from core_rerank.types import Document


def written(folder: Path, content: str | bytes, name: str = "docs.txt") -> str:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_txt_is_one_document_a_line_with_its_line_number(tmp_path: Path) -> None:
    source = written(tmp_path, "\ufefffirst\r\n\n  second \nthird\u2028still third")
    assert read_documents(source) == [
        Document("first", "1"),
        Document("  second ", "3"),
        Document("third\u2028still third", "4"),
    ]


def test_jsonl_has_text_id_title_and_metadata(tmp_path: Path) -> None:
    rows = [
        {"_id": "a", "title": "A", "text": "one", "year": 1999},
        {"text": "two", "title": None},
        {"_id": 7, "text": "", "title": ""},
    ]
    source = written(tmp_path, "\n\n".join(map(json.dumps, rows)) + "\n", "docs.jsonl")
    assert read_documents(source) == [
        Document("one", "a", "A", {"year": 1999}),
        Document("two"),
        Document("", "7"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "form", "texts"),
    [
        ("docs", '\n{"text": "a"}\n', None, ["a"]),
        ("docs", "a {b}\n", None, ["a {b}"]),
        ("docs.NDJSON", '{"text": "a"}', None, ["a"]),
        ("docs.txt", '{"text": "a"}', None, ['{"text": "a"}']),
        ("docs.txt", '{"text": "a"}', "jsonl", ["a"]),
        ("docs.jsonl", "plain", "txt", ["plain"]),
        ("docs", "[not json", None, ["[not json"]),
        ("docs", " \n", None, []),
        ("docs.jsonl", "", None, []),
    ],
)
def test_format_is_named_or_found_out(
    tmp_path: Path, name: str, content: str, form: str | None, texts: list[str]
) -> None:
    documents = read_documents(written(tmp_path, content, name), form)
    assert [document.text for document in documents] == texts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": "b"', "line 2 is not JSON"),
        ('{"text": "a"}\n\n["b"]', "line 3: expected an object with 'text'"),
        ('{"txt": "a"}', "line 1: the key 'text' is missing; its keys: 'txt'"),
        ("{}", "line 1: the key 'text' is missing; its keys: none"),
        ('{"text": null}', "line 1: 'text' must be a string, not null"),
        ('{"text": 5}', "line 1: 'text' must be a string, not 5"),
        ('{"text": "a", "title": ["x"]}', "line 1: 'title' must be a string"),
        ('{"text": "a", "_id": true}', "line 1: '_id' must be a string, not true"),
        ('{"text": "a", "_id": "x"}\n{"text": "b", "_id": "x"}', "line 2: a second document"),
        (b'{"text": "a"}\n{"text": "\xff"}', "line 2 is not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        read_documents(written(tmp_path, content, "docs.jsonl"))
    assert caught.value.code == 2


def test_a_json_array_is_told_from_lines(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="one JSON array"):
        read_documents(written(tmp_path, '[\n{"text": "a"}\n]', "docs.json"))


def test_unreadable_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is a folder"):
        read_documents(str(tmp_path))
    with pytest.raises(CommandError, match=r"cannot read .*nothing.txt: No such file"):
        read_documents(str(tmp_path / "nothing.txt"))


def test_files_are_written_whole_and_leave_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    link = tmp_path / "link.html"
    link.symlink_to(target)
    write_text(link, "new ✓")
    assert target.read_text(encoding="utf-8") == "new ✓"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "\ud800")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_unwritable_targets_are_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="is a folder"):
        write_text(tmp_path, "x")
    with pytest.raises(CommandError, match="nowhere does not exist"):
        write_text(tmp_path / "nowhere" / "page.html", "x")


def test_devices_are_written_to_and_not_replaced() -> None:
    before = os.stat(os.devnull).st_ino
    write_text(Path(os.devnull), "x")
    assert os.stat(os.devnull).st_ino == before


NOISY = """
import logging, os, subprocess, sys, warnings
from core_rerank.commands.terminal import quiet_engine, say
import typer
with quiet_engine(verbose=VERBOSE):
    print("printed by a library")
    os.write(1, b"from C to stdout\\n")
    os.write(2, b"from C to stderr\\n")
    subprocess.run([sys.executable, "-c", "print('from the engine process')"], check=True)
    logging.getLogger("vllm.triton_utils").warning("early words")
    warnings.warn("not ours")
    say("our progress")
    FAIL
typer.echo("data")
"""


def noisy(verbose: bool, fail: str = "") -> subprocess.CompletedProcess[str]:
    code = NOISY.replace("VERBOSE", str(verbose)).replace("FAIL", fail)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_stdout_is_data_only_and_engines_are_quiet() -> None:
    result = noisy(verbose=False)
    assert result.stdout == "data\n"
    assert result.stderr == "printed by a library\nour progress\n"


def test_verbose_shows_the_engine_on_stderr() -> None:
    result = noisy(verbose=True)
    assert result.stdout == "data\n"
    for words in ("from C to stdout", "from C to stderr", "from the engine process", "not ours"):
        assert words in result.stderr


def test_a_failure_shows_the_engines_last_words() -> None:
    result = noisy(verbose=False, fail="raise RuntimeError('engine died')")
    assert result.stdout == ""
    assert "The engine's last words" in result.stderr
    assert "  from the engine process\n" in result.stderr
