"""Following requests with a program: rows by cache slot, preemption, what is read once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scheduler_outputs import new_request, step

from hook_runtime.errors import ProbeError
from hook_runtime.follower import EXTRA_ARG, Follower, Piece, RunningProgram, Stretch, rows_of
from hook_runtime.probes import HiddenStateProbe
from hook_runtime.program_results import ProgramResults
from hook_runtime.programs import Program
from hook_runtime.results import Part

SIZE = 4
PROGRAM = Program((HiddenStateProbe([1]), HiddenStateProbe([1], reduce="mean")))


def new(name: str, tokens: int, blocks: list[int], computed: int = 0, **how: Any) -> Any:
    extra = {EXTRA_ARG: {"id": f"p-{name}", "program": PROGRAM.wire}}
    return new_request(name, tokens, blocks, computed, **{"extra": extra, **how})


def follower() -> Follower:
    return Follower(lambda text: Program.from_wire(text, {}))


def test_prompt_decode_and_end() -> None:
    follow = follower()
    (first,), _ = follow.step(
        step({"a": 6, "b": 3}, (new("a", 6, [5, 2]), new("b", 3, [9], extra={})))
    )
    assert (first.start, first.stop) == (0, 6)
    assert first.slots(0, SIZE).tolist() == [20, 21, 22, 23, 8, 9]
    first.run.done = 6
    (decode,), _ = follow.step(step({"a": 1}, cached=(("a", None, 6, False),)))
    assert decode.slots(0, SIZE).tolist() == [10]
    decode.run.done = 7
    (more,), _ = follow.step(step({"a": 2}, cached=(("a", [7], 7, False),)))
    assert more.slots(0, SIZE).tolist() == [11, 28]
    assert follow.step(step({}, finished=("a",))) == ([], [])
    assert len(follow) == 0


def test_resumed_as_either_runner_does() -> None:
    follow = follower()
    (first,), _ = follow.step(step({"a": 6}, (new("a", 6, [5, 2]),)))
    first.run.done = 8
    (again,), _ = follow.step(step({"a": 8}, cached=(("a", [1, 3], 0, True),)))
    assert again.slots(0, SIZE).tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    (as_new,), _ = follow.step(step({"a": 4}, (new("a", 6, [8, 9], computed=4),)))
    assert as_new.run is first.run
    assert as_new.slots(0, SIZE).tolist() == [36, 37, 38, 39]
    assert as_new.run.failure is None


def test_skipped_tokens_and_lost_blocks_are_noticed() -> None:
    follow = follower()
    (first,), _ = follow.step(step({"a": 6}, (new("a", 6, [5, 2]),)))
    first.run.done = 6
    (gap,), _ = follow.step(step({"a": 1}, cached=(("a", None, 7, False),)))
    assert "skipped tokens 6 to 7" in str(gap.run.failure)
    with pytest.raises(ProbeError, match="no cache block"):
        Stretch(run([0]), 0, 2).slots(0, SIZE)


def run(blocks: list[int]) -> RunningProgram:
    return RunningProgram("a", "p-a", "k", PROGRAM, 6, [blocks], 0, 0)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (new("a", 3, [1], mm_features=[object()]), "text prompt"),
        (new("a", 3, [1], extra={EXTRA_ARG: {"id": "p-a", "program": "{}"}}), "not a program"),
        (new("a", 3, [1], extra={EXTRA_ARG: {"id": "p-a", "program": "{"}}), "Expecting"),
    ],
)
def test_what_cannot_be_read_is_refused(request_: Any, says: str) -> None:
    stretches, ((run_id, reason),) = follower().step(step({"a": 3}, (request_,)))
    assert stretches == []
    assert run_id == "p-a"
    assert says in reason


@pytest.mark.parametrize("kind", [ImportError, AttributeError, KeyError, RuntimeError])
def test_what_a_plugin_raises_refuses_its_request_only(kind: type[Exception]) -> None:
    def read(text: str) -> Program:
        if text == "theirs":
            raise kind("gone")
        return Program.from_wire(text, {})

    follow = Follower(read)
    theirs = new("b", 3, [9], extra={EXTRA_ARG: {"id": "p-b", "program": "theirs"}})
    (first,), ((run_id, reason),) = follow.step(step({"a": 6, "b": 3}, (theirs, new("a", 6, [5]))))
    assert first.run.request_id == "a"
    assert run_id == "p-b"
    assert reason.startswith(f"{kind.__name__}: ")
    assert "gone" in reason


def steered(name: str, computed: int = 0, salt: str | None = "s", program: str = "") -> Any:
    extra = {"id": f"p-{name}", "program": program or PROGRAM.wire, "salt": salt}
    return new(name, 6, [1, 2], computed, extra={EXTRA_ARG: extra})


def spoil_in_step(follow: Follower) -> None:
    (first,), _ = follow.step(step({"a": 6}, (steered("a"),)))
    first.run.fail("a fault")


def spoil_and_end(follow: Follower) -> None:
    spoil_in_step(follow)
    follow.step(step({}, finished=("a",)))


def refuse(follow: Follower) -> None:
    follow.step(step({"a": 6}, (steered("a", program="{}"),)))


def abandon(follow: Follower) -> None:
    follow.step(step({"a": 6}, (steered("a"),)))
    follow.abandon()


@pytest.mark.parametrize("spoil", [spoil_in_step, spoil_and_end, refuse, abandon])
def test_a_prefix_cached_by_a_failed_request_is_not_taken(spoil: Any) -> None:
    """Requests that were sent before anybody on the engine's side knew of the failure."""
    follow = follower()
    spoil(follow)
    names = {"b": ("s", 4), "c": ("s", 0), "d": ("other", 4), "e": (None, 4)}
    arriving = tuple(steered(n, computed, salt) for n, (salt, computed) in names.items())
    stretches, refused = follow.step(step(dict.fromkeys(names, 2), arriving))
    assert refused == []
    assert {s.run.request_id for s in stretches if s.run.failure is not None} == {"b"}
    # c was computed in full; preempted, it would take its beginning from the cache
    for stretch in stretches:
        stretch.run.done = 6
    resumed = tuple((n, [1, 2], 4, True) for n in "cde")
    stretches, _ = follow.step(step(dict.fromkeys("cde", 2), cached=resumed))
    assert [s.run.request_id for s in stretches if s.run.failure is not None] == ["c"]


def test_a_failed_request_that_arrives_with_the_one_that_takes_its_prefix() -> None:
    stretches, refused = follower().step(
        step({"a": 6, "b": 2}, (steered("a", program="{}"), steered("b", 4)))
    )
    assert [run_id for run_id, _ in refused] == ["p-a"]
    assert "whose program failed" in str(stretches[0].run.failure)


def test_rows_are_found_in_any_order() -> None:
    mapping = torch.tensor([40, 41, -1, 7, 8, 9, -1])
    assert rows_of(np.array([8, 9, 40]), mapping).tolist() == [4, 5, 0]
    with pytest.raises(ProbeError, match="not found"):
        rows_of(np.array([8, 10]), mapping)


def test_what_an_engine_computes_ahead_is_left_out() -> None:
    one = run([1, 2])
    rows = torch.arange(8.0).reshape(8, 1)
    one.pieces[(0, 1)] = [
        Piece(0, 6, Part(rows, None), 0),
        Piece(6, 7, Part(rows, None), 6),
        Piece(7, 8, Part(rows, None), 7),
    ]
    one.pieces[(1, 1)] = [
        Piece(0, 6, Part(rows[:1] + 12, None), 0),
        Piece(6, 7, Part(rows[:1] + 2, None), 0),
    ]
    one.done = 8
    results = ProgramResults()
    results.follow(one)
    (taken,) = results.take([("p-a", 7)])
    plain, mean = taken["read"]
    assert plain["positions"] == [0, 7]
    assert np.frombuffer(plain["data"], np.float32).tolist() == list(range(7))
    assert np.frombuffer(mean["data"], np.float32).tolist() == [2.0]
    assert results.take([("p-a", 7)]) == [{}]
    assert one.pieces == {}


def test_results_nobody_takes() -> None:
    results = ProgramResults()
    results.follow(run([1]))
    results.refuse("p-b", "no")
    results.discard(["p-a", "p-c"])
    assert results.take([("p-b", 1)]) == [{"error": "no"}]
    assert len(results) == 0
