"""What a benchmark prints and writes: verdicts, speeds, and files that survive a stop."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from core_rerank.eval.bench_report import NO_GOAL, Figure, Report, Row, print_table
from core_rerank.eval.timing import Comparison


@pytest.mark.parametrize(
    ("ratio", "low", "high", "verdict"),
    [
        (1.0, 0.99, 1.02, "met"),
        (1.0, 0.99, 1.05, "met, within noise"),
        (1.04, 0.99, 1.05, "unclear"),
        (1.05, 1.04, 1.06, "missed"),
    ],
)
def test_verdicts(ratio: float, low: float, high: float, verdict: str) -> None:
    comparison = Comparison((1.0,), (1.0,), ratio, low, high)
    assert Row("x", comparison, "at most 1.03", 0.0, 1.03).verdict == verdict
    assert Row("x", comparison, NO_GOAL, 0.0, 1.03).verdict == ""


def test_speeds_are_those_of_the_median_runs() -> None:
    comparison = Comparison((1.0, 2.0, 8.0), (4.0, 4.0, 4.0), 2.0, 1.0, 4.0)
    row = Row("x", comparison, NO_GOAL, 0.0, math.inf, 8, "queries")
    assert row.speeds == (4.0, 2.0)
    assert Row("x", comparison, NO_GOAL, 0.0, math.inf).speeds is None


def test_every_addition_is_printed_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "bench.json"
    report = Report({"device": "cpu"}, path)
    comparison = Comparison((1.0,), (5.0,), 5.0, 4.5, 5.5)
    report.add(Row("warm is faster", comparison, "at least 4", 4.0, math.inf, 10, "documents"))
    assert json.loads(path.read_text())["results"][0]["a"] == [1.0]
    report.add(Figure("shadow", 3.1, "%", "of the KV cache"))
    report.leave_out("sweep", "not run: budget")
    written = json.loads(path.read_text())
    assert written["device"] == "cpu"
    assert written["results"][0]["verdict"] == "met"
    assert written["figures"][0]["value"] == 3.1
    assert written["missing"] == {"sweep": "not run: budget"}
    assert [p.name for p in path.parent.iterdir()] == ["bench.json"]
    print_table(report, "a bench")
    out = capsys.readouterr().out
    assert "warm is faster (10 / 2 documents/s)" in out
    assert "not run: budget" in out
    assert "3.1 %" in out
