"""Interleaved comparisons with a clock that the test controls, and the bench's verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from core_rerank.eval import timing
from core_rerank.eval.bench import Row, print_table, runs, write_json
from core_rerank.eval.timing import Comparison, compare, summarise


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Now, in seconds; actions move it."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def _advance(clock: list[float], seconds: float) -> None:
    clock[0] += seconds


def test_both_sides_alternate_after_a_warm_up(clock: list[float]) -> None:
    calls: list[str] = []

    def action(name: str, seconds: float) -> timing.Action:
        def run(repeat: int) -> None:
            calls.append(f"{name}{repeat}")
            _advance(clock, seconds)

        return run

    ticks: list[int] = []
    result = compare(
        action("a", 2.0),
        action("b", 3.0),
        2,
        before=lambda _: _advance(clock, 100.0),
        after_each=lambda: ticks.append(1),
    )
    assert calls == ["a-1", "b-1", "b0", "a0", "a1", "b1"]
    assert len(ticks) == 6
    assert result == Comparison((2.0, 2.0), (3.0, 3.0), 1.5, 1.5, 1.5)
    calls.clear()
    compare(action("a", 1.0), action("b", 1.0), 2, alternate=False)
    assert calls == ["a-1", "b-1", "a0", "b0", "a1", "b1"]


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    result = summarise([1.0, 2.0, 4.0], [1.1, 2.0, 8.0])
    assert result.ratio == pytest.approx(1.1)
    assert (result.low, result.high) == (1.0, 2.0)
    assert result.times(0.5).high == 1.0
    assert result.inverse().ratio == pytest.approx(1 / 1.1)
    assert (result.inverse().low, result.inverse().high) == (0.5, 1.0)
    for a, b in (([], []), ([1.0], [])):
        with pytest.raises(ValueError, match="pairs of timings are needed"):
            summarise(a, b)


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
    row = Row("x", Comparison((1.0,), (1.0,), ratio, low, high), "at most 1.03", 0.0, 1.03)
    assert row.verdict == verdict


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison((1.0,), (5.0,), 5.0, 4.5, 5.5)
    row = Row("warm is faster", comparison, "at least 4", 4.0, math.inf)
    print_table([row])
    assert "warm is faster" in capsys.readouterr().out
    write_json([row], tmp_path / "new" / "bench.json", {"device": "cpu"})
    written = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert written["device"] == "cpu"
    assert written["results"][0]["verdict"] == "met"
    assert written["results"][0]["a"] == [1.0]


def test_length_of_the_bar() -> None:
    assert runs(9) == 2 * (4 * 10 + 28)
