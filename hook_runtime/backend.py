"""The seam between ranking and capture: anything that turns requests into captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from .specs import Capture, CaptureRequest, ModelInfo


@runtime_checkable
class CaptureBackend(Protocol):
    """What `core_rerank` needs of a model: implemented by HookLLM and TransformersBackend."""

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        ...

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        """Run all requests as one batch; captures in request order. Safe to call from threads."""
        ...

    def close(self) -> None:
        """Free the model; further calls raise ClosedError. May be called twice."""
        ...


@runtime_checkable
class GeneratingBackend(CaptureBackend, Protocol):
    """A backend whose engine generates too: HookLLM, and AsyncHookLLM through BridgedHookLLM."""

    @property
    def cache_salt(self) -> str:
        """vLLM's ``cache_salt`` with which a prompt finds what the captures computed."""
        ...


@runtime_checkable
class AsyncCaptureBackend(CaptureBackend, Protocol):
    """A backend whose callers share its batches: implemented by BridgedHookLLM."""

    async def acapture(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """As ``capture``, from any event loop; cancelling it cancels the requests."""
        ...

    def check_health(self) -> None:
        """Raise EngineDeadError once the engine's process is gone, ClosedError after ``close``."""
        ...
