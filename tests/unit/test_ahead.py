"""How much of one call is in the engine: it never runs dry, and nobody waits for a whole call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from hook_runtime.ahead import Prompt, Room, in_turn, tokens_to_compute

COMPUTED_S, FETCHED_S = 0.005, 0.05
Start = Callable[[asyncio.Event], Coroutine[Any, Any, int]]


def test_a_null_pass_computes_what_its_query_did_not() -> None:
    documents = tuple(range(80))
    query, null = (*documents, *range(20)), (*documents, *range(12))
    other = (*range(5, 85), 7)
    prompts = [Prompt(t, 80) for t in (query, null, other, query)]
    assert tokens_to_compute(prompts) == [100, 12, 81, 100]
    assert tokens_to_compute(prompts, cached=False) == [100, 92, 81, 100]
    assert tokens_to_compute([Prompt((4, 5), 0), Prompt((4, 6), 0)]) == [2, 2]


def test_sharing_ends_at_another_adapter_and_is_never_free() -> None:
    long = tuple(range(800))
    prompts = [Prompt((*long, n), 800, adapter) for n, adapter in ((1, 1), (2, 1), (3, 2))]
    assert tokens_to_compute(prompts) == [801, 100, 801]


def test_room_for_two_of_any_size_or_for_many_small_ones() -> None:
    room = Room.of(step=10, engines=1)
    assert room.holds([], 500)
    assert room.holds([500], 500)
    assert not room.holds([500, 500], 1)
    assert room.holds([10, 10, 10], 10)
    assert not room.holds([10, 10, 10], 11)
    assert Room.of(step=10, engines=2).holds([500, 500, 500], 500)


class _Engine:
    """Computes one request after the other; remembers what waited in it."""

    def __init__(self, count: int, fault: int = -1, stuck: int = -1) -> None:
        self.count, self.fault, self.stuck = count, fault, stuck
        self.started = self.inside = self.most = self.cancelled = 0
        self.ran_dry = False
        self.turn = asyncio.Lock()

    def starts(self) -> list[Start]:
        return [partial(self.run, number) for number in range(self.count)]

    async def run(self, number: int, left: asyncio.Event) -> int:
        self.started += 1
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            if number == self.stuck:
                await asyncio.Event().wait()
            async with self.turn:
                await asyncio.sleep(COMPUTED_S)
                if number == self.fault:
                    raise ValueError(number)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.inside -= 1
            self.ran_dry |= not self.inside and self.started < self.count
            left.set()
        await asyncio.sleep(FETCHED_S)
        return number


def _alone() -> bool:
    return asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(("size", "most"), [(100, 2), (10, 4), (1, 12)])
def test_the_engine_holds_what_there_is_room_for_and_never_runs_dry(size: int, most: int) -> None:
    done: list[int] = []

    async def main() -> None:
        engine = _Engine(12)
        found = await in_turn(engine.starts(), [size] * 12, Room.of(10, 1), lambda: done.append(1))
        assert found == list(range(12))
        assert engine.most == most
        assert not engine.ran_dry
        await asyncio.sleep(0)
        assert _alone()

    asyncio.run(main())
    assert len(done) == 12


def test_a_fault_ends_the_call_and_cancels_what_is_in_the_engine() -> None:
    async def main() -> None:
        engine = _Engine(50, fault=3, stuck=0)
        with pytest.raises(ValueError, match="3"):
            await in_turn(engine.starts(), [100] * 50, Room.of(10, 1), lambda: None)
        assert engine.started <= 6
        assert engine.cancelled >= 1
        assert engine.inside == 0
        await asyncio.sleep(0)
        assert _alone()

    asyncio.run(main())


@pytest.mark.parametrize("after_s", [0, 4 * COMPUTED_S])
def test_a_cancelled_call_leaves_nothing_behind(after_s: float) -> None:
    async def main() -> None:
        engine = _Engine(50, stuck=0)
        call = asyncio.create_task(
            in_turn(engine.starts(), [100] * 50, Room.of(10, 1), lambda: None)
        )
        await asyncio.sleep(after_s)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert engine.started < 50
        assert engine.inside == 0
        await asyncio.sleep(0)
        assert _alone()

    asyncio.run(main())
