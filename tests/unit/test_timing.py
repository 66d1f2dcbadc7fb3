"""Interleaved comparisons with a clock that the test controls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core_rerank.eval import timing
from core_rerank.eval.bench import runs
from core_rerank.eval.idle_hook import IN_PLACE, TAKEN_OUT, idle_hook_seconds
from core_rerank.eval.timing import Comparison, compare, interleave, summarise


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


def test_every_side_begins_in_turn(clock: list[float]) -> None:
    order: list[str] = []
    sides = {"a": 1.0, "b": 2.0, "c": 4.0}

    def action(name: str) -> timing.Action:
        def run(repeat: int) -> None:
            order.append(f"{name}{repeat}")
            _advance(clock, sides[name] + repeat)

        return run

    prepared: list[str] = []
    seconds = interleave(
        {name: action(name) for name in sides},
        2,
        before=lambda name, repeat: prepared.append(f"{name}{repeat}"),
    )
    assert order == ["a-1", "b-1", "c-1", "b0", "c0", "a0", "c1", "a1", "b1"]
    assert prepared == order
    assert seconds == {"a": (1.0, 2.0), "b": (2.0, 3.0), "c": (4.0, 5.0)}


def test_length_of_the_bar() -> None:
    assert runs(9) == 2 * 4 * 10 + 4 * 37


class FakeLLM:
    """Takes 3 seconds with a hook in place, and 2 without."""

    def __init__(self, clock: list[float], hooks: int) -> None:
        self.clock, self.hooks, self.in_place = clock, hooks, hooks > 0

    def reset_prefix_cache(self) -> None:
        _advance(self.clock, 100.0)

    def collective_rpc(self, method: str, args: tuple[bool]) -> list[int]:
        assert method == "bench_hook"
        (self.in_place,) = args
        return [self.hooks]

    def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> None:
        _advance(self.clock, 3.0 if self.in_place else 2.0)


def test_an_idle_hook_is_timed_in_place_and_taken_out(clock: list[float]) -> None:
    hooked, plain = FakeLLM(clock, 1), FakeLLM(clock, 0)
    ticks: list[int] = []
    seconds = idle_hook_seconds(
        SimpleNamespace(llm=hooked), {"unhooked": plain}, [], None, 2, lambda: ticks.append(1)
    )
    assert seconds == {IN_PLACE: (3.0, 3.0), TAKEN_OUT: (2.0, 2.0), "unhooked": (2.0, 2.0)}
    assert hooked.in_place
    assert len(ticks) == 9
    with pytest.raises(RuntimeError, match="hook was not found"):
        idle_hook_seconds(
            SimpleNamespace(llm=plain), {"unhooked": plain}, [], None, 2, lambda: None
        )
