"""rerank(): one call, with a reranker that the process keeps for each model and its settings."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from .inputs import check_input, check_top_n
from .reranker import DEFAULT_MODEL, Documents, Reranker
from .types import DocId, Ranking


def rerank(
    query: str,
    documents: Documents,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    doc_ids: Iterable[DocId] | None = None,
    top_n: int | None = None,
    explain: bool = False,
    **settings: Any,
) -> Ranking:
    """Rank ``documents`` with a `Reranker` that this process keeps and re-uses.

    There is one for each ``model`` and ``settings`` (those of `Reranker`); it is loaded by the
    first call and closed when the process ends. The rest is as in ``Reranker.rerank``, whose
    arguments are checked before anything is loaded.
    """
    given = check_input(query, documents, doc_ids)
    top_n = check_top_n(top_n)
    return _shared(model, settings).rerank(
        given.query,
        given.documents,
        doc_ids=None if doc_ids is None else given.doc_ids,  # pyright: ignore[reportArgumentType]
        top_n=top_n,
        explain=explain,
    )


@dataclass(slots=True)
class _Slot:
    """Room for one shared reranker; the lock lets other models load at the same time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reranker: Reranker | None = None


_slots: dict[object, _Slot] = {}
_slots_lock = threading.Lock()


def _shared(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> Reranker:
    given = signature(Reranker).bind(model, **settings)
    given.apply_defaults()  # a default spelled out must not start a second engine
    with _slots_lock:
        slot = _slots.setdefault(_setting_key(given.arguments), _Slot())
    with slot.lock:
        if slot.reranker is None:
            slot.reranker = Reranker(model, **settings)
            # After loading, so that it runs before what the engine itself registered.
            atexit.register(slot.reranker.close)
        return slot.reranker


def _setting_key(value: object) -> object:
    """A hashable stand-in for a setting: equal settings give equal keys."""
    if isinstance(value, Mapping):
        return ("mapping", frozenset((key, _setting_key(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return ("list", tuple(_setting_key(item) for item in value))
    if isinstance(value, set | frozenset):
        return ("set", frozenset(_setting_key(item) for item in value))
    return (type(value), value)
