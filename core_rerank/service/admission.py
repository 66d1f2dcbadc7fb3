"""Who may run now, who waits, and who is turned away: a bounded queue with priorities."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math

from .errors import QueueFull

_Waiting = tuple[int, int, asyncio.Future[None]]
_WEIGHT = 0.2  # of the newest duration in the running mean


class Admission:
    """At most ``max_running`` run and ``max_waiting`` wait; the most urgent go first.

    Work that may take long (``long``) leaves a quarter of the turns, at least one where there are
    several, to the rest. Use from one event loop.
    """

    def __init__(self, max_running: int, max_waiting: int) -> None:
        self._max_running = max_running
        self._max_long = max(1, max_running - max(1, max_running // 4))
        self._max_waiting = max_waiting
        self._order = itertools.count()
        self._short: list[_Waiting] = []
        self._long: list[_Waiting] = []
        self._mean_s = 1.0
        self._running_long = 0
        self.running = 0
        self.waiting = 0

    async def enter(self, priority: int = 0, *, long: bool = False) -> None:
        """Wait for a turn, 0 being the most urgent; call ``leave`` after it.

        Raises:
            QueueFull: too many wait already.
        """
        if self._has_room(long):
            self._begin(long)
            return
        if self.waiting >= self._max_waiting:
            raise QueueFull(
                f"{self.running} requests run and {self.waiting} wait, which is the limit "
                f"(max_waiting={self._max_waiting}): come back later.",
                retry_after_s=self.wait_estimate_s(),
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = self._long if long else self._short
        heapq.heappush(queue, (priority, next(self._order), turn))
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the turn came at the same moment
                self._end(long)
            raise
        finally:
            self.waiting -= 1

    def leave(self, seconds: float, *, long: bool = False) -> None:
        """The turn is over after ``seconds``; the next one begins."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)
        self._end(long)

    def wait_estimate_s(self) -> int:
        """Whole seconds, from 1, until a request that comes now would have its turn."""
        rounds = (self.waiting + 1) / self._max_running
        return max(1, min(120, math.ceil(rounds * self._mean_s)))

    def _has_room(self, long: bool) -> bool:
        return self.running < self._max_running and not (
            long and self._running_long >= self._max_long
        )

    def _begin(self, long: bool) -> None:
        self.running += 1
        self._running_long += long

    def _end(self, long: bool) -> None:
        self.running -= 1
        self._running_long -= long
        while queues := [
            (queue[0], is_long, queue)
            for queue, is_long in ((self._short, False), (self._long, True))
            if queue and self._has_room(is_long)
        ]:
            (_, _, turn), is_long, queue = min(queues, key=lambda found: found[0][:2])
            heapq.heappop(queue)
            if not turn.done():
                self._begin(is_long)
                turn.set_result(None)
