"""Running backends that a process's rerankers share, so that a model is loaded only once."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Head, ModelInfo

from .backends import OpenBackend, open_backend, wanted_layers
from .models import ResolvedModel


@dataclass(slots=True, eq=False)
class _Running:
    """A running backend, and how many rerankers have it."""

    opened: OpenBackend
    users: int = 1


@dataclass(slots=True, eq=False)
class _Room:
    """The backends of one model and its engine settings; they differ in the layers they kept."""

    loading: threading.Lock = field(default_factory=threading.Lock)
    running: list[_Running] = field(default_factory=list)


class BackendPool:
    """Lends running backends. Thread-safe; different models may load at the same time."""

    def __init__(self) -> None:
        self._rooms: dict[object, _Room] = {}
        self._lock = threading.Lock()

    def lend(
        self,
        backend: str,
        resolved: ResolvedModel,
        heads: Sequence[Head] | None,
        engine: Mapping[str, Any],
    ) -> OpenBackend:
        """As ``open_backend``, but one that runs already and kept the layers needed is preferred.

        The ``close`` of what is returned gives it back. The backend itself is closed when nobody
        has it any more, and at the latest when the process ends.
        """
        layers = wanted_layers(heads, engine)
        others = {name: value for name, value in engine.items() if name != "layers"}
        key = (resolved, backend, setting_key(others))
        with self._lock:
            room = self._rooms.setdefault(key, _Room())
        with room.loading:
            with self._lock:
                for running in room.running:
                    if _suits(running.opened.model, heads, layers):
                        running.users += 1
                        return self._lent(room, running)
            running = _Running(open_backend(backend, resolved, heads, engine))
            # After loading, so that it runs before what the engine itself registered.
            atexit.register(running.opened.close)
            with self._lock:
                room.running.append(running)
            return self._lent(room, running)

    def withdraw(self, backend: CaptureBackend) -> Callable[[], None] | None:
        """Never lend ``backend`` again; returns what closes it, or None if it is not ours."""
        with self._lock:
            for room in self._rooms.values():
                for running in room.running:
                    if running.opened.backend is backend:
                        room.running.remove(running)
                        return partial(_close, running.opened)
        return None

    def _lent(self, room: _Room, running: _Running) -> OpenBackend:
        return replace(running.opened, close=partial(self._take_back, room, running))

    def _take_back(self, room: _Room, running: _Running) -> None:
        with self._lock:
            running.users -= 1
            if running.users or running not in room.running:
                return
            room.running.remove(running)
        _close(running.opened)


def setting_key(value: object) -> object:
    """A hashable stand-in for a setting: equal settings give equal keys."""
    if isinstance(value, Mapping):
        return ("mapping", frozenset((key, setting_key(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(setting_key(item) for item in value))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(setting_key(item) for item in value))
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return (type(value), value)


class _Same:
    """Stands for a value that has no hash: equal to the same object only, which it keeps alive."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _suits(model: ModelInfo, heads: Sequence[Head] | None, layers: object) -> bool:
    if layers == "auto" and heads:
        # A head that the model does not have needs no other engine: it is refused on any.
        return not model.layers_kept <= max(head.layer for head in heads) < model.num_layers
    return model.layers_kept == (model.num_layers if layers is None else layers)


def _close(opened: OpenBackend) -> None:
    atexit.unregister(opened.close)
    opened.close()
