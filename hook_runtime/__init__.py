"""Probes inside a running vLLM: ask for the attention of chosen heads, get it back exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_engine import AsyncHookLLM
    from .backend import AsyncCaptureBackend, CaptureBackend
    from .engine import HookLLM, Probed
    from .errors import (
        ClosedError,
        EngineDeadError,
        HookRuntimeError,
        IncompleteCaptureError,
        ProbeError,
        ShadowMemoryError,
        UnsupportedModelError,
        UnsupportedVLLMError,
    )
    from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo
    from .threaded import ThreadedHookLLM
    from .transformers_backend import TransformersBackend

_MODULE_OF = {
    "AsyncCaptureBackend": "backend",
    "AsyncHookLLM": "async_engine",
    "AttentionProbe": "specs",
    "Capture": "specs",
    "CaptureBackend": "backend",
    "CaptureRequest": "specs",
    "ClosedError": "errors",
    "EngineDeadError": "errors",
    "Head": "specs",
    "HookLLM": "engine",
    "HookRuntimeError": "errors",
    "IncompleteCaptureError": "errors",
    "ModelInfo": "specs",
    "ProbeError": "errors",
    "Probed": "engine",
    "ShadowMemoryError": "errors",
    "ThreadedHookLLM": "threaded",
    "TransformersBackend": "transformers_backend",
    "UnsupportedModelError": "errors",
    "UnsupportedVLLMError": "errors",
}

__all__ = [
    "AsyncCaptureBackend",
    "AsyncHookLLM",
    "AttentionProbe",
    "Capture",
    "CaptureBackend",
    "CaptureRequest",
    "ClosedError",
    "EngineDeadError",
    "Head",
    "HookLLM",
    "HookRuntimeError",
    "IncompleteCaptureError",
    "ModelInfo",
    "ProbeError",
    "Probed",
    "ShadowMemoryError",
    "ThreadedHookLLM",
    "TransformersBackend",
    "UnsupportedModelError",
    "UnsupportedVLLMError",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
