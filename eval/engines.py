"""Engines that systems share: one at a time, closed when the next system needs another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from core_rerank.backends import OpenBackend, open_backend
from core_rerank.models import ResolvedModel
from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Head

from .files import to_json


@dataclass(frozen=True, slots=True)
class EngineNeed:
    """What a system needs of an engine.

    Attributes:
        model: what runs.
        backend: ``vllm`` or ``transformers``.
        heads: those it reads; None needs every layer (all heads, or generation).
        options: the engine's own arguments.
    """

    model: ResolvedModel
    backend: str = "vllm"
    heads: tuple[Head, ...] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layers(self) -> int | None:
        """How many layers are loaded; None is all."""
        return None if self.heads is None else 1 + max(head.layer for head in self.heads)

    @property
    def key(self) -> tuple[str, str, str, int | None, str]:
        """Equal where one engine serves both."""
        options = to_json(self.options)
        return self.model.path_or_id, self.model.model_id, self.backend, self.layers, options


class Engines:
    """Starts what is needed, and keeps at most one engine open.

    ``needs`` is everything that will be asked for: an engine starts with room for the heads of
    all systems that will share it.
    """

    def __init__(self, needs: Iterable[EngineNeed]) -> None:
        self._heads: dict[object, dict[Head, None]] = {}
        for need in needs:
            self._heads.setdefault(need.key, {}).update(dict.fromkeys(need.heads or ()))
        self._key: object = None
        self._opened: OpenBackend | None = None

    def get(self, need: EngineNeed | None) -> CaptureBackend | None:
        """A running engine with an empty prefix cache; None, and nothing runs, for None."""
        if need is None:
            self.close()
            return None
        if self._opened is None or need.key != self._key:
            self.close()
            heads = tuple(self._heads.get(need.key, ())) if need.heads is not None else None
            self._opened = open_backend(need.backend, need.model, heads, need.options)
            self._key = need.key
        _forget_prefixes(self._opened.backend)
        return self._opened.backend

    def close(self) -> None:
        """Stop the engine that runs, if any."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None
        self._key = None

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _forget_prefixes(backend: CaptureBackend) -> None:
    """One system must not be timed on documents that another one left in vLLM's cache."""
    llm = getattr(backend, "llm", None)
    if llm is not None:
        llm.reset_prefix_cache()
