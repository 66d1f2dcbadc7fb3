"""BridgedHookLLM: an AsyncHookLLM for threads and for other event loops than its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from .async_engine import AsyncHookLLM
from .config import ProgramConfig
from .desk import DEFAULT, ProgramInfo
from .programmed import Performed
from .programs import Program
from .specs import Capture, CaptureRequest, ModelInfo

T = TypeVar("T")


class BridgedHookLLM:
    """A `CaptureBackend` on an `AsyncHookLLM` that runs, whose callers share its batches.

    From the engine's own event loop await ``acapture`` and ``aperform``; the others wait, and are
    for other threads.
    """

    def __init__(self, hooked: AsyncHookLLM) -> None:
        """``hooked`` stays its owner's to close."""
        self.hooked = hooked
        self._loop = hooked.loop

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self.hooked.model

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self.hooked.tokenizer

    @property
    def cache_salt(self) -> str:
        """As ``AsyncHookLLM.cache_salt``."""
        return self.hooked.cache_salt

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
            return self.wait(self.hooked.capture(requests, lora_request=lora_request))
        from tqdm import tqdm

        with tqdm(total=len(requests), desc="capture", unit="prompt") as bar:
            return self.wait(
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
        return self.wait(self.hooked.perform(prompt, program, *args, **how))

    async def aperform(
        self, prompt: Any, program: Any = DEFAULT, *args: Any, **how: Any
    ) -> Performed:
        """As ``perform``, awaited on the caller's own loop; cancelling it cancels the request."""
        self._check_open()
        work = self.hooked.perform(prompt, program, *args, **how)
        return await asyncio.wrap_future(self._submit(work))

    def load_program(
        self, name: str, program: Program | ProgramConfig | str | Path, *, default: bool = False
    ) -> None:
        """As ``AsyncHookLLM.load_program``."""
        self._check_open()
        self.wait(self.hooked.load_program(name, program, default=default))

    def unload_program(self, name: str) -> None:
        """As ``AsyncHookLLM.unload_program``."""
        self._check_open()

        async def unload() -> None:
            self.hooked.unload_program(name)

        self.wait(unload())

    def list_programs(self) -> list[ProgramInfo]:
        """The programs that are loaded."""
        return self.hooked.list_programs()

    def check_health(self) -> None:
        """Raise EngineDeadError once vLLM's engine process is gone, ClosedError after ``close``."""
        self._check_open()
        self.hooked.check_open()

    def close(self) -> None:
        """Nothing: whoever started the engine closes it."""

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the engine's loop; its result. For other threads than that of the loop.

        RuntimeError on the loop itself.
        """
        if _running_loop() is self._loop:
            work.close()
            raise RuntimeError(
                "a call that waits, made on the engine's own event loop, would wait for ever: "
                "await the asynchronous one (arerank, acapture, aperform) instead."
            )
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

    def _check_open(self) -> None:
        self.hooked.check_open()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
