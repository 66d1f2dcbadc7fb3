"""Fetches finished captures from the workers: as many as are ready in one call.

A call waits for the engine's running step, so one at a time is made, for all who wait by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Call = Callable[[str, list[str], list[str]], Awaitable[list[list[dict[str, Any]]]]]


class Fetcher:
    """``call(method, capture_ids, unwanted)`` asks all workers; lists are by worker, then by id."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._waiting: dict[str, asyncio.Future[list[dict[str, Any]]]] = {}
        self._unwanted: list[str] = []
        self._task: asyncio.Task[None] | None = None

    async def fetch(self, capture_id: str) -> list[dict[str, Any]]:
        """Every worker's result for a capture whose request has ended."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[capture_id] = future
        self._wake()
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(capture_id, None) is not None:
                self.discard(capture_id)
            raise

    def discard(self, capture_id: str) -> None:
        """The workers may drop this capture: nobody will fetch it."""
        self._unwanted.append(capture_id)
        self._wake()

    async def close(self) -> None:
        """Stop fetching; whoever still waits is cancelled."""
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="hook_runtime fetcher")

    async def _run(self) -> None:
        while self._waiting or self._unwanted:
            waiting, self._waiting = self._waiting, {}
            unwanted, self._unwanted = self._unwanted, []
            try:
                workers = await self._call("hook_runtime_take", list(waiting), unwanted)
            except BaseException as error:
                for future in waiting.values():
                    if isinstance(error, asyncio.CancelledError):
                        future.cancel()
                    elif not future.done():
                        future.set_exception(error)
                if not isinstance(error, Exception):
                    raise
                return  # the engine is gone: what is unwanted there is so too
            for i, future in enumerate(waiting.values()):
                if not future.done():
                    future.set_result([results[i] for results in workers])
