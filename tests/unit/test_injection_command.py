"""``detect-heads --task injection`` on a backend in which one head sees attacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend
from typer.testing import CliRunner

from core_rerank import Head, InjectionHeads
from core_rerank.backends import OpenBackend
from core_rerank.cli import app
from hook_runtime.specs import CaptureRequest

pytest.importorskip("sklearn")

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SEES = Head(2, 1)


@pytest.fixture(scope="module")
def backend(smollm2_tokenizer: Any) -> FakeBackend:
    """Head 2-1 is drawn by the word "ignore"; the others by the length of the data."""
    ignore = smollm2_tokenizer.encode(" ignore")[0]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        data = request.prompt_token_ids[slice(*request.probe.spans[1])]
        drawn = 0.5 if ignore in data and head == SEES else 0.1 + 0.01 * len(data)
        return np.array([0.2, drawn])

    return FakeBackend(smollm2_tokenizer, name=MODEL, attention=attention, kind="vllm")


@pytest.fixture
def detect(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """The command in a folder with DATA.jsonl and BENIGN.jsonl."""
    words = ["mail", "cat", "dog", "letter", "invoice", "table"]
    rows = [
        {
            "id": f"{i}",
            "text": f"the {words[i % 6]} {' and so on' * (i % 5)}{' ignore it' * (i % 2)}",
            "label": i % 2,
        }
        for i in range(40)
    ]
    (tmp_path / "DATA.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "BENIGN.jsonl").write_text("\n".join(map(json.dumps, rows[:20])))
    monkeypatch.chdir(tmp_path)
    opened = OpenBackend(backend, backend.model, backend.model.name, close=lambda: None)
    monkeypatch.setattr("core_rerank.backends.open_backend", lambda *_: opened)
    monkeypatch.setattr(backend, "close", lambda: None)
    arguments = ["detect-heads", "--task", "injection", "--data", "DATA.jsonl", "-o", "out.yaml"]
    return lambda *more: CliRunner().invoke(app, [*arguments, *more])


def test_finds_the_head_and_writes_where_it_is_from(detect: Callable[..., Any]) -> None:
    result = detect("--k-sigma", "1", "--fpr", "0.1")
    assert result.exit_code == 0, result.stderr
    heads = InjectionHeads.from_yaml("out.yaml")
    assert heads.heads == (SEES,)
    assert heads.data == "DATA"
    assert heads.found_with["texts"] == "40 (20 attacks)"
    assert heads.found_with["fpr"] == "0.1"
    assert "DATA: AUROC 1.000, held out" in result.stdout
    assert 0 < heads.threshold < 0.5 / 0.7


def test_stored_attention_is_not_measured_again(
    detect: Callable[..., Any], backend: FakeBackend
) -> None:
    assert detect("--k-sigma", "1").exit_code == 0
    before = len(backend.batches)
    again = detect("--method", "signed", "--top", "2", "--benign", "BENIGN.jsonl")
    assert again.exit_code == 0, again.stderr
    assert len(backend.batches) == before + 1  # the benign texts, in one batch
    assert InjectionHeads.from_yaml("out.yaml").found_with["threshold_on"] == "BENIGN"
    assert "flags at most 1.0% of 10 your benign texts" in again.stdout
    assert "10 benign texts cannot show a rate of 1.00%" in again.stdout
    other = detect("--instruction", "Answer")
    assert other.exit_code == 2
    assert "with instruction 'Say xxxxxx' instead of 'Answer'" in " ".join(other.stderr.split())


def test_files_of_one_name_are_refused_before_anything_is_measured(
    detect: Callable[..., Any], backend: FakeBackend, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "DATA.json").write_text((tmp_path / "DATA.jsonl").read_text())
    before = len(backend.batches)
    for option, file in (
        ("--data", "other/DATA.json"),
        ("--benign", "other/DATA.json"),
        ("--data", "DATA.jsonl"),
    ):
        result = detect(option, file)
        assert result.exit_code == 2
        assert "2 files of --data and --benign are called 'DATA'" in told(result)
    assert len(backend.batches) == before
    assert not (tmp_path / "out.store").exists()


def told(result: Any) -> str:
    """stderr on one line."""
    return " ".join(result.stderr.split())


def test_options_that_would_do_nothing_are_refused(detect: Callable[..., Any]) -> None:
    result = detect("--method", "signed", "--k-sigma", "4")
    assert result.exit_code == 2
    assert "--k-sigma is of --method k-sigma only" in told(result)
    result = detect("--max-layers", "5")
    assert result.exit_code == 2
    assert "max_layers is 5, but 4 layers were measured" in told(result)
    assert detect("--max-layers", "4", "--k-sigma", "1").exit_code == 0
    assert InjectionHeads.from_yaml("out.yaml").found_with["k_sigma"] == "1"


def test_refusals(detect: Callable[..., Any], tmp_path: Path) -> None:
    assert detect("--fpr", "1").exit_code == 2
    (tmp_path / "DATA.jsonl").write_text(json.dumps({"text": "a", "label": 2}))
    result = detect()
    assert result.exit_code == 2
    assert "'label' must be 1" in result.stderr


def test_the_other_task_keeps_its_options() -> None:
    help_of = {
        task: CliRunner().invoke(app, ["detect-heads", *task, "--help"]).stdout
        for task in ((), ("--task=injection",), ("--task", "ranking"))
    }
    assert "--temperature" in help_of[()]
    assert help_of[()] == help_of[("--task", "ranking")]
    assert "--fpr" in help_of[("--task=injection",)]
    assert "--temperature" not in help_of[("--task=injection",)]
