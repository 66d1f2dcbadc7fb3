"""A gate that many may pass together, or one alone; neither kind waits for the other for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable

Waiting = deque[asyncio.Future[None]]


class Gate:
    """For one event loop. Phase-fair: whoever is to be alone holds back those who come later, and
    lets all who waited meanwhile pass before the next one is alone.
    """

    def __init__(self) -> None:
        self._together = 0
        self._alone = False
        self._to_share: Waiting = deque()
        self._to_be_alone: Waiting = deque()

    @contextlib.asynccontextmanager
    async def passing(self, *, alone: bool = False) -> AsyncIterator[Callable[[], None]]:
        """Wait for a place and hold it; what is yielded gives it up early."""
        await (self._enter_alone() if alone else self._enter())
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                self._leave(alone)

        try:
            yield leave
        finally:
            leave()

    async def _enter(self) -> None:
        if not self._alone and not self._to_be_alone:
            self._together += 1
            return
        await self._wait(self._to_share, alone=False)

    async def _enter_alone(self) -> None:
        if not self._alone and not self._together and not self._to_be_alone:
            self._alone = True
            return
        await self._wait(self._to_be_alone, alone=True)

    async def _wait(self, queue: Waiting, *, alone: bool) -> None:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():  # the place was given before the cancellation arrived
                self._leave(alone)
                raise
            if place in queue:
                queue.remove(place)
            if not self._alone and not self._to_be_alone:
                self._let_all_in()
            raise

    def _leave(self, alone: bool) -> None:
        if alone:
            self._alone = False
            self._let_all_in()
        else:
            self._together -= 1
        if not self._together and not self._alone:
            self._alone = _give_first(self._to_be_alone)

    def _let_all_in(self) -> None:
        while _give_first(self._to_share):
            self._together += 1


def _give_first(queue: Waiting) -> bool:
    """Give a place to the first who still waits, if anybody does."""
    while queue:
        place = queue.popleft()
        if not place.done():
            place.set_result(None)
            return True
    return False
