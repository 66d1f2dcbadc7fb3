"""Which data-parallel engine a request goes to: the one that has its documents cached."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

MAX_REMEMBERED = 100_000


class Router:
    """Sends equal keys to the same engine, and a new key to the one with the fewest tokens to do.

    A query and its null pass share their documents, which are then computed once; so do later
    queries about the same documents.
    """

    def __init__(self, engines: int) -> None:
        self._load = [0] * engines
        self._given = [0] * engines  # settles ties, so that idle engines take turns
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def assign(self, key: Hashable, tokens: int) -> int:
        """The engine for a request of ``tokens`` tokens; ``release`` it when it is done."""
        engine = self._known.get(key)
        if engine is None:
            engine = min(range(len(self._load)), key=lambda i: (self._load[i], self._given[i]))
            self._known[key] = engine
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        self._load[engine] += tokens
        self._given[engine] += tokens
        return engine

    def release(self, engine: int, tokens: int) -> None:
        """A request that was assigned has ended."""
        self._load[engine] -= tokens
