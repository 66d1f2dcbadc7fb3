"""Who may run now, who waits, and who is turned away: a bounded queue with priorities."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math

from .errors import QueueFull

_WEIGHT = 0.2  # of the newest duration in the running mean


class Admission:
    """At most ``max_running`` run and ``max_waiting`` wait; the most urgent go first.

    Use from one event loop.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._order = itertools.count()
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._mean_s = 1.0
        self.running = 0
        self.waiting = 0

    async def enter(self, priority: int = 0) -> None:
        """Wait for a turn, 0 being the most urgent; call ``leave`` after it.

        Raises:
            QueueFull: too many wait already.
        """
        if self.running < self._max_running:
            self.running += 1
            return
        if self.waiting >= self._max_waiting:
            raise QueueFull(
                f"{self.running} requests run and {self.waiting} wait, which is the limit "
                f"(max_waiting={self._max_waiting}): come back later.",
                retry_after_s=self.wait_estimate_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (priority, next(self._order), turn))
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came at the same moment
                self._next()
            raise
        finally:
            self.waiting -= 1

    def leave(self, seconds: float) -> None:
        """The turn is over after ``seconds``; the next one begins."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        self._next()

    def wait_estimate_s(self) -> int:
        """Whole seconds, from 1, until a request that comes now would have its turn."""
        rounds = (self.waiting + 1) / self._max_running
        return max(1, min(120, math.ceil(rounds * self._mean_s)))

    def _next(self) -> None:
        while self._heap:
            _, _, turn = heapq.heappop(self._heap)
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
