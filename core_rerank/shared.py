"""rerank() and arerank(): one call, with engines and rerankers kept for the next one."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from hook_runtime.backend import CaptureBackend
from hook_runtime.errors import ClosedError

from .backends import OpenBackend
from .errors import CoreRerankError
from .heads import HeadSet
from .injection_heads import InjectionHeads
from .inputs import check_input, check_top_n
from .models import ResolvedModel
from .pool import BackendPool, setting_key
from .reranker import DEFAULT_MODEL, Documents, Reranker
from .settings import check_explain
from .types import DocId, Explain, Ranking


def rerank(
    query: str,
    documents: Documents,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    doc_ids: Iterable[DocId] | None = None,
    top_n: int | None = None,
    explain: Explain = False,
    **settings: Any,
) -> Ranking:
    """Rank ``documents`` with a `Reranker` that this process keeps and re-uses.

    ``settings`` are those of `Reranker`. A model is loaded by the first call that names it with
    these engine settings; later calls share it, whatever their heads, strategy or window are,
    unless they need layers that were not loaded: "icr" reads all, "core" and "qr" those up to
    the last head. All are closed when the process ends, and one that fails is closed at once, so
    that the next call starts afresh. The rest is as in ``Reranker.rerank``, whose arguments are
    checked before anything is loaded.
    """
    arguments = _checked(query, documents, doc_ids, top_n, explain)
    reranker = _shared(model, settings)
    try:
        return reranker.rerank(**arguments)
    except Exception as error:
        if _is_engine_failure(error):
            _let_go(reranker.backend, error)
        raise


async def arerank(
    query: str,
    documents: Documents,
    model: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    doc_ids: Iterable[DocId] | None = None,
    top_n: int | None = None,
    explain: Explain = False,
    **settings: Any,
) -> Ranking:
    """As ``rerank``, leaving the event loop free meanwhile; see ``Reranker.arerank``."""
    arguments = _checked(query, documents, doc_ids, top_n, explain)
    reranker = await asyncio.to_thread(_shared, model, settings)
    try:
        return await reranker.arerank(**arguments)
    except Exception as error:
        if _is_engine_failure(error):
            await asyncio.to_thread(_let_go, reranker.backend, error)
        raise


def _checked(
    query: str,
    documents: Documents,
    doc_ids: Iterable[DocId] | None,
    top_n: int | None,
    explain: Explain,
) -> dict[str, Any]:
    """The arguments of a rerank, checked, iterators read."""
    given = check_input(query, documents, doc_ids)
    return {
        "query": given.query,
        "documents": given.documents,
        "doc_ids": None if doc_ids is None else given.doc_ids,
        "top_n": check_top_n(top_n),
        "explain": check_explain(explain),
    }


class _SharedReranker(Reranker):
    """A reranker whose engine others may be reading from too."""

    def _open_backend(
        self, backend: str | CaptureBackend, resolved: ResolvedModel, engine: Mapping[str, Any]
    ) -> OpenBackend:
        if isinstance(backend, str):
            return _pool.lend(backend, resolved, self._heads_read, engine)
        return super()._open_backend(backend, resolved, engine)


@dataclass(slots=True)
class _Slot:
    """Room for one shared reranker; the lock lets others start at the same time."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    reranker: _SharedReranker | None = None


_pool = BackendPool()
_slots: dict[object, _Slot] = {}
_slots_lock = threading.Lock()


def _shared(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> _SharedReranker:
    settings = _read_now(settings)
    given = signature(Reranker).bind(model, **settings)
    given.apply_defaults()  # a default spelled out is the same setting
    with _slots_lock:
        slot = _slots.setdefault(setting_key(_hashable(given.arguments)), _Slot())
    with slot.lock:
        reranker = slot.reranker
        if reranker is None:
            reranker = slot.reranker = _SharedReranker(model, **settings)
        return reranker


def _read_now(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the heads in place of what may say something else next time."""
    fixed = dict(settings)
    heads, config = fixed.get("heads"), fixed.get("config")
    if isinstance(heads, Iterator):
        fixed["heads"] = tuple(heads)
    elif config and heads is None:
        fixed |= {"heads": HeadSet.from_yaml(config), "config": None}
    screen_heads = fixed.get("screen_heads")
    if isinstance(screen_heads, str | os.PathLike):
        fixed["screen_heads"] = InjectionHeads.from_yaml(screen_heads)
    return fixed


def _hashable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with their text in place of screening heads, which have no hash."""
    heads = arguments["screen_heads"]
    text = heads.model_dump_json() if isinstance(heads, InjectionHeads) else heads
    return {**arguments, "screen_heads": text}


def _is_engine_failure(error: Exception) -> bool:
    """Whether ``error`` may leave the engine unusable; bad input and NaN do not."""
    if isinstance(error, ClosedError):
        return True
    return not isinstance(error, CoreRerankError | TypeError | ValueError)


def _let_go(backend: CaptureBackend, error: Exception) -> None:
    """Forget a backend that failed and every reranker on it; close it unless it was given."""
    close = _pool.withdraw(backend)
    with _slots_lock:
        for slot in _slots.values():
            if slot.reranker is not None and slot.reranker.backend is backend:
                slot.reranker = None
    if close is not None:
        try:
            close()
        except Exception as second:
            error.add_note(f"closing the engine after that failed too: {second!r}")
