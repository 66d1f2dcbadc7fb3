"""How much of one call is in the engine: it never runs dry, and nobody waits for a whole call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from hook_runtime.ahead import Room, in_turn, tokens_to_compute

Start = Callable[[asyncio.Event], Coroutine[Any, Any, int]]


def test_a_null_pass_computes_what_its_query_did_not() -> None:
    documents = tuple(range(90))
    query, null = (*documents, 1, 2, 3), (*documents, 7)
    other = (*range(5, 95), 7)
    prompts = [(query, 90), (null, 90), (other, 90), (query, 90), ((4, 5), 0), ((4, 6), 0)]
    assert tokens_to_compute(prompts) == [93, 1, 91, 93, 2, 2]


def test_room_for_two_of_any_size_or_for_many_small_ones() -> None:
    room = Room.of(step=10, engines=1)
    assert room.holds([], 500)
    assert room.holds([500], 500)
    assert not room.holds([500, 500], 1)
    assert room.holds([10, 10, 10], 10)
    assert not room.holds([10, 10, 10], 11)
    assert Room.of(step=10, engines=2).holds([500, 500, 500], 500)


class _Engine:
    """Computes one request after the other; remembers the most that waited in it."""

    def __init__(self) -> None:
        self.inside = self.most = 0
        self.turn = asyncio.Lock()

    async def run(self, number: int, left: asyncio.Event, fault: bool = False) -> int:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            async with self.turn:
                await asyncio.sleep(0)
                if fault:
                    raise ValueError(number)
        finally:
            self.inside -= 1
            left.set()
        await asyncio.sleep(0.01)  # fetched while the next one is computed
        return number


def _starts(engine: _Engine, count: int, fault: int = -1) -> list[Start]:
    return [partial(_run, engine, n, n == fault) for n in range(count)]


async def _run(engine: _Engine, number: int, fault: bool, left: asyncio.Event) -> int:
    return await engine.run(number, left, fault)


@pytest.mark.parametrize(("size", "most"), [(100, 2), (10, 4), (1, 12)])
def test_the_engine_holds_what_there_is_room_for(size: int, most: int) -> None:
    done: list[int] = []

    async def main() -> tuple[list[int], int]:
        engine = _Engine()
        found = await in_turn(
            _starts(engine, 12), [size] * 12, Room.of(10, 1), lambda: done.append(1)
        )
        return found, engine.most

    assert asyncio.run(main()) == (list(range(12)), most)
    assert len(done) == 12


def test_a_fault_ends_the_call_and_leaves_nothing_in_the_engine() -> None:
    async def main() -> int:
        engine = _Engine()
        with pytest.raises(ValueError, match="3"):
            await in_turn(_starts(engine, 50, fault=3), [100] * 50, Room.of(10, 1), lambda: None)
        return engine.inside

    assert asyncio.run(main()) == 0
