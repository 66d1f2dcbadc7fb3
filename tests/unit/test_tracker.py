"""Following the scheduler: chunks, prefix hits on blocks nobody captured, preemption, refusals."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from scheduler_outputs import new_request, step

from hook_runtime.specs import AttentionProbe
from hook_runtime.tracker import EXTRA_ARG, Tracker

SIZE = 4
GROUPS = {0: SIZE}
PROBE = AttentionProbe(["1-0"], (8, 10), [(0, 5)])


def new(name: str, tokens: int, blocks: list[int], computed: int = 0, **how: Any) -> Any:
    extra = {EXTRA_ARG: {"id": f"c-{name}", "probe": json.dumps(PROBE.to_json())}}
    return new_request(name, tokens, blocks, computed, **{"extra": extra, **how})


def recorded(tracker: Tracker, *chunks: Any) -> None:
    for chunk in chunks:
        tracker.record(chunk, GROUPS)


def test_a_prompt_in_two_chunks() -> None:
    tracker = Tracker([SIZE])
    (first,), _ = tracker.step(step({"a": 6}, (new("a", 11, [3, 4]),)))
    recorded(tracker, first)
    (second,), _ = tracker.step(step({"a": 5}, cached=(("a", [5], 6, False),)))
    recorded(tracker, second)
    assert (first.start, first.stop, second.start, second.stop) == (0, 6, 6, 11)
    assert second.request is first.request
    assert second.request.blocks == [[3, 4, 5]]
    tracker.finish(second.request)
    assert tracker.step(step({"a": 1}, cached=(("a", None, 11, False),))) == ([], [])


def test_a_prefix_hit_counts_only_blocks_that_were_recorded_and_not_overwritten() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 11}, (new("a", 11, [3, 4, 5]),)))
    recorded(tracker, chunk)
    (hit,), _ = tracker.step(step({"b": 3}, (new("b", 11, [3, 4, 6], computed=8),)))
    assert tracker.missing(hit.request, 0, 0, SIZE) == (0, 0)
    # Block 4 goes to an ordinary request, then shows up as somebody's prefix again.
    tracker.step(step({"o": 4}, (new("o", 4, [4], extra=None),)))
    (hit,), _ = tracker.step(step({"c": 3}, (new("c", 11, [3, 4, 7], computed=8),)))
    assert tracker.missing(hit.request, 0, 0, SIZE) == (1, 0)
    assert tracker.missing(hit.request, 8, 0, SIZE) == (0, 0)  # out of the window's sight


def test_blocks_that_a_window_dropped_are_told_from_stale_ones() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 11}, (new("a", 11, [3, 4, 5]),)))
    recorded(tracker, chunk)
    (hit,), _ = tracker.step(step({"b": 3}, (new("b", 11, [0, 4, 6], computed=8),)))
    assert tracker.missing(hit.request, 0, 0, SIZE) == (0, 1)
    assert tracker.missing(hit.request, 4, 0, SIZE) == (0, 0)


def test_a_hit_with_other_tokens_or_another_lora_is_not_the_same_block() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 8}, (new("a", 11, [3, 4, 5]),)))
    recorded(tracker, chunk)
    other = new("b", 11, [3, 4, 6], computed=8)
    other.prompt_token_ids[0] = 99
    lora = new("c", 11, [3, 4, 7], computed=8, lora_request=SimpleNamespace(lora_int_id=1))
    (b, c), _ = tracker.step(step({"b": 3, "c": 3}, (other, lora)))
    assert tracker.missing(b.request, 0, 0, SIZE) == (2, 0)
    assert tracker.missing(c.request, 0, 0, SIZE) == (2, 0)


def test_a_copied_block_is_not_trusted() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 8}, (new("a", 11, [3, 4, 5]),)))
    recorded(tracker, chunk)
    (hit,), _ = tracker.step(
        step({"b": 3}, (new("b", 11, [3, 4, 6], computed=8),), copies=[(9, 4)])
    )
    assert tracker.missing(hit.request, 0, 0, SIZE) == (1, 0)


def test_preemption_starts_over_in_both_runners_ways() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 6}, (new("a", 11, [3, 4]),)))
    recorded(tracker, chunk)
    chunk.request.rows_done = 1
    (resumed,), _ = tracker.step(step({"a": 7}, cached=(("a", [8, 9, 7], 4, True),)))
    assert resumed.request.rows_done == 0
    assert resumed.request.own_start == 4
    assert (resumed.start, resumed.stop) == (4, 11)
    (again,), _ = tracker.step(step({"a": 11}, (new("a", 11, [1, 2, 0]),)))
    assert again.request is not resumed.request
    assert again.start == 0


def test_a_resumed_request_whose_prompt_is_wholly_cached_is_still_scored() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 1}, (new("a", 11, [3, 4, 5], computed=12),)))
    assert (chunk.start, chunk.stop, chunk.request.own_start) == (11, 11, 11)


def test_skipped_tokens_fail_the_capture() -> None:
    tracker = Tracker([SIZE])
    (chunk,), _ = tracker.step(step({"a": 6}, (new("a", 11, [3, 4]),)))
    (later,), _ = tracker.step(step({"a": 5}, cached=(("a", [5], 6, False),)))
    recorded(tracker, later)  # the first chunk was never recorded
    assert later.request.failure == "the scheduler skipped tokens"
    assert chunk.request is later.request


def test_unreadable_probes_are_rejected_and_run_as_ordinary_requests() -> None:
    tracker = Tracker([SIZE])
    image = new("i", 11, [1, 2, 3], mm_features=["picture"])
    short = new("s", 6, [4, 5])
    stale = new(
        "v", 11, [6, 7, 8], extra={EXTRA_ARG: {"id": "c-v", "probe": json.dumps({"version": 0})}}
    )
    chunks, rejected = tracker.step(step({"i": 11, "s": 6, "v": 11}, (image, short, stale)))
    assert chunks == []
    assert len(tracker) == 0
    assert {r.capture_id: r.reason.split()[0] for r in rejected} == {
        "c-i": "only",
        "c-s": "a",
        "c-v": "not",
    }


def test_finished_and_abandoned_requests_are_forgotten() -> None:
    tracker = Tracker([SIZE])
    tracker.step(step({"a": 6, "b": 6}, (new("a", 11, [3, 4]), new("b", 11, [5, 6]))))
    tracker.step(step({"b": 5}, cached=(("b", [7], 6, False),), finished=("a",)))
    assert len(tracker) == 1
    assert [r.capture_id for r in tracker.abandon()] == ["c-b"]
    assert len(tracker) == 0
