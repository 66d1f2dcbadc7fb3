"""Parts of the online engine that need no engine: fetching, routing, and the awaitable rerank."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fake_backend import FakeBackend, SharedFakeBackend

from core_rerank.reranker import Reranker
from hook_runtime.fetcher import Fetcher
from hook_runtime.gate import Gate
from hook_runtime.router import Router

DOCUMENTS = ["a cat sat on the mat", "rain fell in Spain", "the cat saw a dog", "stones"]


class Workers:
    """Answers like two workers; remembers what it was asked, one call at a time."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], list[str]]] = []
        self.free = asyncio.Event()
        self.free.set()
        self.error: Exception | None = None

    async def call(self, method: str, ids: list[str], unwanted: list[str]) -> Any:
        assert method == "hook_runtime_take"
        self.asked.append((ids, unwanted))
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return [[{"worker": w, "id": i} for i in ids] for w in (0, 1)]


def test_whoever_waits_is_served_by_the_next_call() -> None:
    async def run() -> None:
        workers = Workers()
        workers.free.clear()
        fetcher = Fetcher(workers.call)
        first = asyncio.create_task(fetcher.fetch("1"))
        await asyncio.sleep(0.01)
        others = [asyncio.create_task(fetcher.fetch(i)) for i in ("2", "3")]
        await asyncio.sleep(0.01)
        others[0].cancel()  # before it was asked for
        await asyncio.sleep(0.01)
        workers.free.set()
        assert await first == [{"worker": 0, "id": "1"}, {"worker": 1, "id": "1"}]
        assert (await others[1])[1] == {"worker": 1, "id": "3"}
        assert workers.asked == [(["1"], []), (["3"], ["2"])]

    asyncio.run(run())


def test_a_failed_call_and_a_close_leave_nobody_waiting() -> None:
    async def run() -> None:
        workers = Workers()
        fetcher = Fetcher(workers.call)
        workers.error = RuntimeError("gone")
        with pytest.raises(RuntimeError, match="gone"):
            await fetcher.fetch("1")
        workers.error = None
        workers.free.clear()
        waiting = [asyncio.create_task(fetcher.fetch(i)) for i in ("2", "3")]
        await asyncio.sleep(0.01)
        await fetcher.close()
        done = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5)
        assert all(isinstance(d, asyncio.CancelledError) for d in done)

    asyncio.run(run())


def test_equal_prefixes_stay_together_and_new_ones_go_where_less_is_to_do() -> None:
    router = Router(2)
    assert [router.assign(key, 10) for key in "aab"] == [0, 0, 1]
    assert router.assign("c", 5) == 1
    router.release(0, 20)
    assert router.assign("d", 1) == 0
    assert router.assign("b", 100) == 1
    idle = Router(3)
    seen = []
    for key in range(6):
        seen.append(idle.assign(key, 7))
        idle.release(seen[-1], 7)
    assert seen == [0, 1, 2, 0, 1, 2]


def shared(tokenizer: Any) -> SharedFakeBackend:
    """A backend that can be awaited, and lets go of the loop meanwhile."""
    return SharedFakeBackend(tokenizer, seconds=0.05)


@pytest.mark.parametrize("kind", [FakeBackend, shared])
def test_arerank_gives_what_rerank_gives(kind: Any, smollm2_tokenizer: Any) -> None:
    reranker = Reranker(backend=kind(smollm2_tokenizer), heads=["1-2", "0-1"], window=2)
    backend = kind(smollm2_tokenizer)
    expected = [reranker.rerank(q, DOCUMENTS, top_n=3) for q in ("cat mat", "dog", "Spain")]
    again = Reranker(backend=backend, heads=["1-2", "0-1"], window=2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    async def run() -> Any:
        ticking = asyncio.create_task(tick())
        got = await asyncio.gather(
            *(again.arerank(q, DOCUMENTS, top_n=3) for q in ("cat mat", "dog", "Spain"))
        )
        ticking.cancel()
        return got

    for got, want in zip(asyncio.run(run()), expected, strict=True):
        assert [(d.index, d.score) for d in got] == [(d.index, d.score) for d in want]
    if kind is shared:
        assert backend.started == 3
        assert ticks > 3


def test_arerank_checks_its_input_as_rerank_does(smollm2_tokenizer: Any) -> None:
    reranker = Reranker(backend=FakeBackend(smollm2_tokenizer), heads=["1-2"])
    with pytest.raises(ValueError, match="query"):
        asyncio.run(reranker.arerank(" ", DOCUMENTS))
    assert not list(asyncio.run(reranker.arerank("cat", [])))


class Visits:
    """Who is inside a gate, and in which order they came in."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.inside: set[str] = set()
        self.order: list[str] = []

    async def pay(self, name: str, turns: int = 3, *, alone: bool = False) -> None:
        async with self.gate.passing(alone=alone):
            self.order.append(name)
            self.inside.add(name)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
                    assert not alone or self.inside == {name}
            finally:
                self.inside.discard(name)

    def start(self, name: str, turns: int = 3, *, alone: bool = False) -> asyncio.Task[None]:
        return asyncio.create_task(self.pay(name, turns, alone=alone))


def test_neither_the_many_nor_those_alone_starve() -> None:
    """Who comes after one that waits to be alone lets it go first, then goes before the next."""

    async def run() -> None:
        visits = Visits()
        tasks = [visits.start("a"), visits.start("b")]
        await asyncio.sleep(0)
        tasks += [visits.start(f"alone {i}", alone=True) for i in range(3)]
        await asyncio.sleep(0)
        tasks += [visits.start("c"), visits.start("d")]
        await asyncio.gather(*tasks)
        assert visits.order == ["a", "b", "alone 0", "c", "d", "alone 1", "alone 2"]
        await visits.pay("e")

    asyncio.run(run())


def test_a_place_that_was_given_up_early_or_cancelled_holds_nobody() -> None:
    async def run() -> None:
        visits = Visits()
        async with visits.gate.passing() as leave:
            leave()
            leave()
            await asyncio.wait_for(visits.pay("alone", alone=True), 5)
        first = visits.start("first", 1000)
        await asyncio.sleep(0)
        waits = [visits.start(f"alone {i}", alone=True) for i in range(2)]
        await asyncio.sleep(0)
        held_back = visits.start("held back")
        await asyncio.sleep(0)
        for task in waits:
            task.cancel()
        await asyncio.wait_for(held_back, 5)
        assert not first.done()
        again = visits.start("alone again", alone=True)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)  # the place is given, and its owner cancelled before it sees that
        again.cancel()
        await asyncio.wait_for(visits.pay("last", alone=True), 5)
        assert visits.order[-2:] == ["held back", "last"]

    asyncio.run(run())


def test_the_gate_under_random_cancellation() -> None:
    async def run() -> None:
        visits, chance = Visits(), random.Random(0)
        tasks = []
        for i in range(400):
            tasks.append(visits.start(str(i), chance.randrange(4), alone=chance.random() < 0.3))
            for _ in range(chance.randrange(3)):
                await asyncio.sleep(0)
            if chance.random() < 0.3:
                chance.choice(tasks).cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert {type(r) for r in results} == {type(None), asyncio.CancelledError}
        await asyncio.wait_for(visits.pay("alone", alone=True), 5)
        await asyncio.wait_for(visits.pay("shared"), 5)

    asyncio.run(run())
