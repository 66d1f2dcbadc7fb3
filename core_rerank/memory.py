"""A bounded, thread-safe memory of values that cost time to make; the least recently used go."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class BoundedMemory(Generic[V]):
    """Holds values whose sizes, in a unit of the owner's, add up to at most ``max_size``."""

    def __init__(self, max_size: int) -> None:
        """``max_size`` = 0 remembers nothing."""
        self._max_size = max_size
        self._size = 0
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> V | None:
        """The value remembered under ``key``, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Hashable, value: V, size: int) -> None:
        """Remember ``value``; one that alone exceeds the bound is not kept."""
        if size > self._max_size:
            return
        with self._lock:
            self._discard(key)
            self._entries[key] = (value, size)
            self._size += size
            while self._size > self._max_size:
                self._discard(next(iter(self._entries)))

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()
            self._size = 0

    @property
    def size(self) -> int:
        """Of all values held now."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

    def _discard(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._size -= entry[1]
