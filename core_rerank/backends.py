"""From a model's name and a backend's name to a running backend; says what to install."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hook_runtime.backend import AsyncCaptureBackend, CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

from .embedded import EMBEDDED_MODELS
from .errors import MissingDependencyError
from .models import ResolvedModel, resolve_model

BACKENDS = ("vllm", "vllm-async", "transformers")


@dataclass(frozen=True, slots=True)
class OpenBackend:
    """A running backend, what it runs, and what to call when it is needed no more.

    ``close`` does nothing to a backend that was running before.
    """

    backend: CaptureBackend
    model: ModelInfo
    model_id: str
    close: Callable[[], None]

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        """As the backend's own; it is not asked for nothing."""
        return self.backend.capture(requests, progress=progress) if requests else []

    async def acapture(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """The same, awaited where the backend can be, else in a thread."""
        if not requests:
            return []
        if isinstance(self.backend, AsyncCaptureBackend):
            return await self.backend.acapture(requests)
        return await asyncio.to_thread(self.backend.capture, requests)


def name_model(model: str | os.PathLike[str], backend: str | CaptureBackend) -> ResolvedModel:
    """The model that will run: ``model``, or what a backend that already runs says it is.

    Fetches an embedded model that is not in the cache; loads nothing.
    """
    if isinstance(backend, str):
        if backend not in BACKENDS:
            raise ValueError(
                f"backend must be one of {', '.join(BACKENDS)} or a CaptureBackend, not "
                f"{backend!r}."
            )
        return resolve_model(model)
    if not isinstance(backend, CaptureBackend):
        raise TypeError(
            f"backend must be one of {', '.join(BACKENDS)} or a CaptureBackend, not "
            f"{type(backend).__name__}."
        )
    if inspect.iscoroutinefunction(backend.capture):
        raise TypeError(
            f"the captures of {type(backend).__name__} are awaited: give Reranker.from_llm(llm), "
            "or hook_runtime.BridgedHookLLM(llm) as the backend."
        )
    info = backend.model
    if Path(info.name).is_dir():
        return resolve_model(info.name)
    return ResolvedModel(info.name, info.name, info.revision)


def open_backend(
    backend: str | CaptureBackend,
    resolved: ResolvedModel,
    heads: Sequence[Head] | None,
    engine: Mapping[str, Any],
) -> OpenBackend:
    """Load ``resolved`` for ``heads`` (None: every head of every layer), or take what runs.

    Only the layers that the heads need are loaded, unless ``engine`` says ``layers``.

    Raises:
        MissingDependencyError: vLLM or torch is not installed; names the command.
        TypeError: an engine argument that the backend does not have, or with a running backend.
    """
    if not isinstance(backend, str):
        if engine:
            raise TypeError(
                f"{', '.join(sorted(engine))} cannot be set on a backend that is already running: "
                "give them to the backend itself."
            )
        return _opened(backend, resolved, close=_leave_open)
    options = {"heads": heads, "name": resolved.model_id, **engine}
    options["layers"] = wanted_layers(heads, engine)
    if resolved.revision and not Path(resolved.path_or_id).is_dir():
        options.setdefault("revision", resolved.revision)
    loaders = {
        "vllm": _load_vllm,
        "vllm-async": _load_vllm_async,
        "transformers": _load_transformers,
    }
    running = loaders[backend](resolved.path_or_id, options)
    return _opened(running, resolved, close=running.close)


def wanted_layers(heads: Sequence[Head] | None, engine: Mapping[str, Any]) -> object:
    """``layers`` of ``engine``; by default "auto" for some heads, None (all) for every head."""
    return engine.get("layers", "auto" if heads else None)


def _opened(
    backend: CaptureBackend, resolved: ResolvedModel, close: Callable[[], None]
) -> OpenBackend:
    info = replace(backend.model, revision=backend.model.revision or resolved.revision)
    return OpenBackend(backend, info, resolved.model_id, close)


def _leave_open() -> None:
    """What closes a backend that somebody else is running: nothing."""


def _load_vllm(path_or_id: str, options: Mapping[str, Any]) -> CaptureBackend:
    options = _for_vllm(options)
    from hook_runtime.engine import HookLLM

    return HookLLM(path_or_id, **options)


def _load_vllm_async(path_or_id: str, options: Mapping[str, Any]) -> CaptureBackend:
    options = _for_vllm(options)
    from hook_runtime.threaded import ThreadedHookLLM

    return ThreadedHookLLM(path_or_id, **options)


def _for_vllm(options: Mapping[str, Any]) -> dict[str, Any]:
    if find_spec("vllm") is None:
        raise MissingDependencyError(
            "vLLM is not installed. To install it: pip install 'core-rerank[gpu]' for NVIDIA GPUs, "
            "or pip install 'core-rerank[cpu]' for CPUs. Or use backend='transformers', which "
            "needs only torch: pip install 'core-rerank[transformers]'."
        )
    from hook_runtime.compat import is_cpu

    embedded = {model.model_id for model in EMBEDDED_MODELS.values()}
    if options["name"] in embedded and is_cpu():
        return {"dtype": "float32", **options}  # exact, and faster than bf16 without AMX
    return dict(options)


def _load_transformers(path_or_id: str, options: Mapping[str, Any]) -> CaptureBackend:
    if find_spec("torch") is None:
        raise MissingDependencyError(
            "PyTorch is not installed. To install it: pip install 'core-rerank[transformers]'. "
            "Or use backend='vllm': pip install 'core-rerank[gpu]' or 'core-rerank[cpu]'."
        )
    from hook_runtime.transformers_backend import TransformersBackend

    known = [name for name in inspect.signature(TransformersBackend).parameters if name != "model"]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(
            f"the transformers backend does not know {', '.join(unknown)}: it takes "
            f"{', '.join(known)}."
        )
    return TransformersBackend(path_or_id, **options)
