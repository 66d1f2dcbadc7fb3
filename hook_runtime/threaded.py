"""ThreadedHookLLM: an AsyncHookLLM on an event loop of its own, for threads and other loops."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from .async_engine import AsyncHookLLM
from .bridged import BridgedHookLLM
from .errors import ClosedError


class ThreadedHookLLM(BridgedHookLLM):
    """A `CaptureBackend` whose callers share the engine's batches, from any thread or event loop.

    Unlike `HookLLM`, whose calls take turns. Takes the arguments of ``AsyncHookLLM.start``, and
    ``data_parallel_size`` among them.
    """

    def __init__(self, model: str | None = None, **arguments: Any) -> None:
        """Start the engine and wait until it is there; errors are those of `AsyncHookLLM`."""
        self._lock = threading.Lock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="hook_runtime engine", daemon=True
        )
        self._thread.start()
        try:
            super().__init__(self.wait(AsyncHookLLM.start(model, **arguments)))
        except BaseException:
            self._closed = True
            self._stop_loop()
            raise

    def close(self) -> None:
        """Stop the engine and free its memory; further calls raise ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self.wait(self.hooked.close())
        finally:
            self._stop_loop()

    def __enter__(self) -> ThreadedHookLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop_loop(self) -> None:
        """After every task has ended, or whoever waits for one would wait for ever."""

        async def end_all() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this ThreadedHookLLM is closed; create a new one.")
