"""How much of one call waits in the engine at once: enough to keep it busy, no more.

vLLM serves first come, first served, and another caller's request would wait for all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
STEPS_AHEAD = 4
"""Prefill steps of one call that may wait in an engine."""
REQUESTS_AHEAD = 2
"""Requests of one call that may wait in an engine whatever their size: one is computed, and the
next is there when it ends."""

SHARED_COST = 8
"""A prompt of shared documents counts as this part of its tokens at least: its query looks at all
of them, and a call about one document must not put thousands of requests before another's."""


class Room(NamedTuple):
    """What a call may have in the engines: so many tokens to compute, or so many requests."""

    tokens: int
    requests: int

    @classmethod
    def of(cls, step: int, engines: int) -> Room:
        """``step``: the most tokens that one engine computes in a step."""
        return cls(STEPS_AHEAD * step * engines, REQUESTS_AHEAD * engines)

    def holds(self, waiting: Sequence[int], more: int) -> bool:
        """Whether a request that computes ``more`` tokens may join those that compute so many."""
        return len(waiting) < self.requests or sum(waiting) + more <= self.tokens


class Prompt(NamedTuple):
    """What a request computes: its tokens, the place of its query in them, and ``apart``, what
    keeps it from the cached tokens of others where it differs."""

    tokens: Sequence[int]
    query: int
    apart: Hashable = None


def tokens_to_compute(prompts: Sequence[Prompt], cached: bool = True) -> list[int]:
    """Of each prompt, where the cache is empty; it stays so unless ``cached``.

    A prompt that begins as the one before it does up to its query shares these documents with it,
    as a null pass does with its query's: the engine computes them once.
    """
    sizes = []
    before = Prompt((), 0)
    for prompt in prompts:
        size, query = len(prompt.tokens), prompt.query
        shared = (
            cached
            and 0 < query <= len(before.tokens)
            and prompt.apart == before.apart
            and prompt.tokens[:query] == before.tokens[:query]
        )
        sizes.append(max(size - query, size // SHARED_COST) if shared else size)
        before = prompt
    return sizes


async def in_turn(
    starts: Sequence[Callable[[asyncio.Event], Coroutine[Any, Any, T]]],
    sizes: Sequence[int],
    room: Room,
    on_done: Callable[[], object],
) -> list[T]:
    """Results in order; the first fault cancels what is left and is raised.

    Each coroutine sets its event once its request has left the engine, or when it ends without.
    ``on_done`` is called after each.
    """
    tasks: list[asyncio.Task[T]] = []
    failed: list[asyncio.Task[T]] = []
    in_engine: dict[asyncio.Task[Any], int] = {}

    def ended(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is not None:
            failed.append(task)
        on_done()

    try:
        for start, size in zip(starts, sizes, strict=True):
            while not room.holds(list(in_engine.values()), size):
                done, _ = await asyncio.wait(in_engine, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del in_engine[task]
                if failed:
                    failed[0].result()  # raises at once
            left_engine = asyncio.Event()
            tasks.append(asyncio.create_task(start(left_engine)))
            tasks[-1].add_done_callback(ended)
            in_engine[asyncio.create_task(left_engine.wait())] = size
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
