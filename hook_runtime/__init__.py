"""Probes inside a running vLLM: ask for the attention of chosen heads, get it back exactly."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import CaptureBackend
    from .engine import HookLLM, Probed
    from .errors import (
        ClosedError,
        HookRuntimeError,
        IncompleteCaptureError,
        ProbeError,
        UnsupportedModelError,
        UnsupportedVLLMError,
    )
    from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo
    from .transformers_backend import TransformersBackend

_MODULE_OF = {
    "AttentionProbe": "specs",
    "Capture": "specs",
    "CaptureBackend": "backend",
    "CaptureRequest": "specs",
    "ClosedError": "errors",
    "Head": "specs",
    "HookLLM": "engine",
    "HookRuntimeError": "errors",
    "IncompleteCaptureError": "errors",
    "ModelInfo": "specs",
    "ProbeError": "errors",
    "Probed": "engine",
    "TransformersBackend": "transformers_backend",
    "UnsupportedModelError": "errors",
    "UnsupportedVLLMError": "errors",
}

__all__ = [
    "AttentionProbe",
    "Capture",
    "CaptureBackend",
    "CaptureRequest",
    "ClosedError",
    "Head",
    "HookLLM",
    "HookRuntimeError",
    "IncompleteCaptureError",
    "ModelInfo",
    "ProbeError",
    "Probed",
    "TransformersBackend",
    "UnsupportedModelError",
    "UnsupportedVLLMError",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
