"""ThreadedHookLLM: an AsyncHookLLM on an event loop of its own, for threads and other loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from .async_engine import AsyncHookLLM
from .desk import DEFAULT, ProgramInfo
from .errors import ClosedError
from .programmed import Performed
from .programs import Program
from .specs import Capture, CaptureRequest, ModelInfo

T = TypeVar("T")


class ThreadedHookLLM:
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
            self.hooked = self._wait(AsyncHookLLM.start(model, **arguments))
        except BaseException:
            self._closed = True
            self._stop_loop()
            raise

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self.hooked.model

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.hooked.tokenizer

    def capture(
        self,
        requests: Sequence[CaptureRequest],
        *,
        lora_request: Any = None,
        progress: bool = False,
    ) -> list[Capture]:
        """As ``AsyncHookLLM.capture``; ``progress`` counts the requests on a bar."""
        self._check_open()
        if not progress:
            return self._wait(self.hooked.capture(requests, lora_request=lora_request))
        from tqdm import tqdm

        with tqdm(total=len(requests), desc="capture", unit="prompt") as bar:
            return self._wait(
                self.hooked.capture(requests, lambda: bar.update(1), lora_request=lora_request)
            )

    async def acapture(
        self, requests: Sequence[CaptureRequest], *, lora_request: Any = None
    ) -> list[Capture]:
        """As ``capture``, awaited on the caller's own loop; cancelling it cancels the requests."""
        self._check_open()
        work = self.hooked.capture(requests, lora_request=lora_request)
        return await asyncio.wrap_future(self._submit(work))

    def perform(self, prompt: Any, program: Any = DEFAULT, *args: Any, **how: Any) -> Performed:
        """As ``AsyncHookLLM.perform``."""
        self._check_open()
        return self._wait(self.hooked.perform(prompt, program, *args, **how))

    async def aperform(
        self, prompt: Any, program: Any = DEFAULT, *args: Any, **how: Any
    ) -> Performed:
        """As ``perform``, awaited on the caller's own loop; cancelling it cancels the request."""
        self._check_open()
        work = self.hooked.perform(prompt, program, *args, **how)
        return await asyncio.wrap_future(self._submit(work))

    def load_program(
        self, name: str, program: Program | str | Path, *, default: bool = False
    ) -> None:
        """As ``AsyncHookLLM.load_program``."""
        self._check_open()
        self._wait(self.hooked.load_program(name, program, default=default))

    def unload_program(self, name: str) -> None:
        """As ``AsyncHookLLM.unload_program``."""
        self._check_open()

        async def unload() -> None:
            self.hooked.unload_program(name)

        self._wait(unload())

    def list_programs(self) -> list[ProgramInfo]:
        """The programs that are loaded."""
        return self.hooked.list_programs()

    def check_health(self) -> None:
        """Raise EngineDeadError once vLLM's engine process is gone, ClosedError after ``close``."""
        self._check_open()
        self.hooked.check_open()

    def close(self) -> None:
        """Stop the engine and free its memory; further calls raise ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        try:
            self._wait(self.hooked.close())
        finally:
            self._stop_loop()

    def __enter__(self) -> ThreadedHookLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in the waiting thread; done already after an error of its own
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop was closed between the caller's check and this
            work.close()
            self._check_open()
            raise

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
