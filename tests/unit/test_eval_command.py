"""``core-rerank eval``: on the real model, stopped by SIGKILL, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from evaluations import beir_folder, run_file
from typer.testing import CliRunner

from core_rerank.cli import app

CHEAP = ("--backend", "transformers", "--depth", "2", "--batch", "2")
SYSTEMS = ("-c", "core:listwise", "-c", "fusion:0.5")


def command(folder: Path, root: Path, output: Path, *more: str) -> list[str]:
    return [
        "eval", "--dataset", str(folder), "--retriever", f"run:{root / 'first.trec'}",
        "--output", str(output), *CHEAP, *more,
    ]  # fmt: skip


def process(arguments: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "core_rerank.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def final_files(folder: Path) -> dict[str, Any]:
    """All final files but for times, token counts and the page that draws them."""
    files: dict[str, Any] = {p.name: p.read_bytes() for p in folder.glob("run-*.trec")}
    files["per_query.csv"] = (folder / "per_query.csv").read_bytes()
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["finished"]
    for system in metrics["systems"]:
        del system["cost"]
    files["metrics.json"] = metrics
    return files


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_to_the_same_files(smollm2_dir: Path, tmp_path: Path) -> None:
    folder, _ = beir_folder(tmp_path), run_file(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = process(command(folder, tmp_path, whole, *SYSTEMS))
    table, said = done.communicate(timeout=300)
    assert done.returncode == 0, said.decode()
    assert b"core:listwise" in table

    journal = parts / "journal" / "core-listwise.jsonl"  # the second of the systems
    killed = process(command(folder, tmp_path, parts, *SYSTEMS))
    deadline = time.monotonic() + 300
    while lines_of(journal) < 2 + 2:  # header, facts and a batch
        assert killed.poll() is None, killed.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert not (parts / "metrics.json").exists()
    assert lines_of(journal) < 2 + 6  # it was in the middle of its work
    again = process(command(folder, tmp_path, parts, *SYSTEMS))
    assert again.wait(300) == 0, again.communicate()[1].decode()
    again.communicate()
    assert final_files(parts) == final_files(whole)
    assert set(final_files(whole)) == {
        "metrics.json", "per_query.csv", "run-first-stage.trec", "run-core.trec",
        "run-core-listwise.trec", "run-core+0.5.trec",
    }  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(*arguments: object) -> str:
    result = run("eval", *arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A collection, and no engine may start."""

    def no_engine(*_: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("core_rerank.eval.engines.open_backend", no_engine)
    return beir_folder(tmp_path)


def test_what_cannot_be_done_is_one_line(folder: Path, smollm2_dir: Path, tmp_path: Path) -> None:
    out = ("--output", tmp_path / "out")
    given = ("--dataset", folder, *out)
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (("--dataset", "nowhere", *out), "nowhere is neither a folder nor a collection of BEIR"),
        ((*given, "--split", "dev"), "dev.tsv is missing. Splits there are: test"),
        ((*given, "--qrels", "none.txt"), "none.txt is missing"),
        ((*given, "-c", "bm25"), "no system 'bm25'"),
        ((*given, "--fusion", "2"), "a fusion must be 'rrf'"),
        ((*given, "--retriever", "run:none.tsv"), "none.tsv is missing: expected a TREC run"),
        ((*given, "--retriever", "splade"), "no retriever 'splade'"),
        ((*given, "--engine", "fast"), "--engine takes NAME=VALUE, not 'fast'"),
        ((*given, "--backend", "transformers", "-c", "rankgpt"), "rankgpt generates on vLLM"),
        (("--dataset", folder, "--output", tmp_path / "file"), "file is a file"),
        ((*given, "--strategy", "icr", "--heads-config", tmp_path / "file"), "reads every head"),
    ):
        assert message in refusal(*arguments)


def test_a_folder_of_other_settings_is_refused_before_an_engine_starts(
    folder: Path, smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("--dataset", folder, "--output", tmp_path / "out", "--depth")
    stopped = run("eval", *given, "2", "--engine", "max_model_len=512")
    assert stopped.exit_code == 1
    assert "an engine was started" in stopped.stderr
    assert "depth was 2, now 3" in refusal(*given, "3")
    assert "system.window was 1, now 4" in refusal(*given, "2", "--window", "4")
    assert "system.engine.max_model_len was 512, now null" in refusal(*given, "2")


def test_a_runs_file_may_lie_beside_the_data(
    folder: Path, smollm2_dir: Path, tmp_path: Path
) -> None:
    run_file(folder)
    result = run(
        "eval", "--dataset", folder, "--output", tmp_path / "out", "-r", "run:first.trec",
    )  # fmt: skip
    kept = json.loads((tmp_path / "out" / "candidates.json").read_text())
    assert kept["settings"]["retriever"] == "run:first.trec"
    assert "tiny/test: 6 judged queries, 6 documents, run:first.trec top 40" in result.stderr
    assert "documents whose id is the query's are kept" in result.stderr
    assert "systems: first-stage, core" in result.stderr


def test_what_failed_is_told(
    folder: Path, smollm2_dir: Path, smollm2_tokenizer: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from fake_backend import FakeBackend

    from core_rerank.backends import OpenBackend

    def too_short(backend: str, resolved: Any, *_: object) -> OpenBackend:
        engine = FakeBackend(
            smollm2_tokenizer, name=resolved.model_id, layers=30, heads=9, max_model_len=85
        )
        return OpenBackend(engine, engine.model, resolved.model_id, engine.close)

    monkeypatch.setattr("core_rerank.eval.engines.open_backend", too_short)
    run_file(folder)
    result = run(
        "eval", "--dataset", folder, "--output", tmp_path / "out", "-r", "run:first.trec",
        "-c", "listwise",
    )  # fmt: skip
    assert result.exit_code == 1, result.stderr
    assert "warning: listwise failed on 6 of 6 queries, which count 0" in result.stderr
    assert "error: no query could be ranked by listwise." in result.stderr
    assert (tmp_path / "out" / "run-core.trec").read_text()
    assert (tmp_path / "out" / "run-listwise.trec").read_text() == ""
