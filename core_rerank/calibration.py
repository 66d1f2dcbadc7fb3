"""Null passes already computed, so that a document's second query need not repeat its own."""

from __future__ import annotations

from collections.abc import Hashable
from hashlib import blake2b
from typing import TYPE_CHECKING

from .memory import BoundedMemory

if TYPE_CHECKING:
    import numpy as np

    from hook_runtime.specs import CaptureRequest

DEFAULT_MAX_FLOATS = 16_000_000


class NullPassMemory:
    """Bounded, thread-safe memory of null-query attention; the least recently used goes first.

    The bound counts float64 values, not entries: 16 million are 128 MB, about 30,000 documents
    of 512 tokens.
    """

    def __init__(self, max_floats: int = DEFAULT_MAX_FLOATS) -> None:
        """``max_floats`` = 0 remembers nothing."""
        if isinstance(max_floats, bool) or not isinstance(max_floats, int) or max_floats < 0:
            raise ValueError(f"max_floats must be a number of floats >= 0, not {max_floats!r}.")
        self._memory: BoundedMemory[np.ndarray] = BoundedMemory(max_floats)

    def get(self, key: Hashable) -> np.ndarray | None:
        """The float64 [tokens] remembered under ``key`` (read-only), or None."""
        return self._memory.get(key)

    def put(self, key: Hashable, values: np.ndarray) -> None:
        """Remember ``values`` [tokens]; one that alone exceeds the bound is not kept."""
        kept = values.astype("float64", copy=True)
        kept.setflags(write=False)
        self._memory.put(key, kept, kept.size)

    def clear(self) -> None:
        """Forget everything."""
        self._memory.clear()

    @property
    def floats(self) -> int:
        """Values held now."""
        return self._memory.size

    def __len__(self) -> int:
        return len(self._memory)


def pass_key(request: CaptureRequest, model: str) -> bytes:
    """What makes two passes the same: model, prompt tokens, rows, documents, heads, reduction."""
    import numpy as np

    probe = request.probe
    heads = "all" if probe.heads == "all" else " ".join(map(str, probe.heads))
    digest = blake2b(digest_size=20)
    digest.update(np.asarray(request.prompt_token_ids, dtype=np.int64).tobytes())
    digest.update(repr((model, probe.query_span, probe.spans, heads, probe.reduction)).encode())
    return digest.digest()
