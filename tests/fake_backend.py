"""A `CaptureBackend` without a model: attention is a plain function of the prompt's tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hook_runtime.errors import ClosedError, EngineDeadError
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

if TYPE_CHECKING:
    from core_rerank import Reranker

DOCUMENTS = ["the cat sat on the mat", "a dog barked", "cat and dog", "nothing of the kind"]
Make = Callable[..., "Reranker"]


def shared_tokens(request: CaptureRequest, head: Head) -> np.ndarray:
    """Attention by common tokens: those that the query's rows contain weigh a hundred times more.

    The other tokens get something too, which depends on the token and on the head.
    """
    ids = np.asarray(request.prompt_token_ids)
    rows = ids[slice(*request.probe.query_span)]
    columns = np.concatenate([ids[slice(*span)] for span in request.probe.spans])
    noise = (columns * 31 + head.layer * 7 + head.head) % 97 / 97
    tokens = (np.isin(columns, rows) + 0.01 * noise) / (1 + head.layer)
    if request.probe.reduction == "tokens":
        return tokens
    lengths = [end - start for start, end in request.probe.spans]
    return np.add.reduceat(tokens, np.cumsum([0, *lengths[:-1]]))


class FakeBackend:
    """Deterministic and independent of what else is in the batch; counts what it was asked."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        name: str = "test/fake",
        layers: int = 4,
        layers_kept: int | None = None,
        heads: int = 3,
        max_model_len: int = 4096,
        kind: str = "fake",
        attention: Callable[[CaptureRequest, Head], np.ndarray] = shared_tokens,
    ) -> None:
        self.model = ModelInfo(
            name=name,
            revision=None,
            num_layers=layers,
            layers_kept=layers_kept or layers,
            num_heads=heads,
            max_model_len=max_model_len,
            dtype="float32",
            device="cpu",
            backend=kind,
        )
        self.tokenizer = tokenizer
        self.batches: list[list[CaptureRequest]] = []
        self.closed = False
        self._attention = attention
        self._lock = threading.Lock()

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        if self.closed:
            raise ClosedError("closed")
        with self._lock:
            self.batches.append(list(requests))
        return [self._capture(request) for request in requests]

    def close(self) -> None:
        self.closed = True

    def _capture(self, request: CaptureRequest) -> Capture:
        info = self.model
        every = tuple(Head(i, h) for i in range(info.layers_kept) for h in range(info.num_heads))
        heads = every if request.probe.heads == "all" else request.probe.heads
        values = np.stack([self._attention(request, head) for head in heads]).astype(np.float32)
        return Capture(heads, values.sum(0, keepdims=True) if request.probe.sum_heads else values)


class SharedFakeBackend(FakeBackend):
    """As an engine whose callers share its batches: takes ``seconds`` for each, and can die."""

    def __init__(self, tokenizer: Any, *, seconds: float = 0.0, **arguments: Any) -> None:
        super().__init__(tokenizer, **arguments)
        self.seconds = seconds
        self.dead = False
        self.started = 0
        self.cancelled = 0

    async def acapture(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        self.started += 1
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.check_health()
        return self.capture(requests)

    def check_health(self) -> None:
        if self.closed:
            raise ClosedError("closed")
        if self.dead:
            raise EngineDeadError("the engine's process died")
