"""Programs inside a running vLLM: read attention and hidden states exactly, and change them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .analyzers import Analyzer, Reading
    from .async_engine import AsyncHookLLM
    from .backend import AsyncCaptureBackend, CaptureBackend, GeneratingBackend
    from .bridged import BridgedHookLLM
    from .config import ProgramConfig, load_config
    from .desk import ProgramInfo
    from .engine import HookLLM, Probed
    from .errors import (
        ClosedError,
        ConfigError,
        EngineDeadError,
        HookRuntimeError,
        IncompleteCaptureError,
        ProbeError,
        ProgramError,
        ShadowMemoryError,
        UnsupportedModelError,
        UnsupportedVLLMError,
    )
    from .interventions import (
        Ablate,
        AddVector,
        HeadIntervention,
        Intervention,
        ProjectTo,
        ScaleHeads,
        StreamIntervention,
    )
    from .probes import HeadOutputProbe, HiddenStateProbe, StateProbe, States
    from .programmed import Analyzed, Performed
    from .programs import Program
    from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo
    from .state_files import load_states
    from .templates import AttentionTemplate
    from .threaded import ThreadedHookLLM
    from .transformers_backend import TransformersBackend
    from .vectors import Vector

_MODULE_OF = {
    "Ablate": "interventions",
    "AddVector": "interventions",
    "Analyzed": "programmed",
    "Analyzer": "analyzers",
    "AsyncCaptureBackend": "backend",
    "AsyncHookLLM": "async_engine",
    "AttentionProbe": "specs",
    "AttentionTemplate": "templates",
    "BridgedHookLLM": "bridged",
    "Capture": "specs",
    "CaptureBackend": "backend",
    "CaptureRequest": "specs",
    "ClosedError": "errors",
    "ConfigError": "errors",
    "EngineDeadError": "errors",
    "GeneratingBackend": "backend",
    "Head": "specs",
    "HeadIntervention": "interventions",
    "HeadOutputProbe": "probes",
    "HiddenStateProbe": "probes",
    "HookLLM": "engine",
    "HookRuntimeError": "errors",
    "IncompleteCaptureError": "errors",
    "Intervention": "interventions",
    "ModelInfo": "specs",
    "Performed": "programmed",
    "ProbeError": "errors",
    "Probed": "engine",
    "Program": "programs",
    "ProgramConfig": "config",
    "ProgramError": "errors",
    "ProgramInfo": "desk",
    "ProjectTo": "interventions",
    "Reading": "analyzers",
    "ScaleHeads": "interventions",
    "ShadowMemoryError": "errors",
    "StateProbe": "probes",
    "States": "probes",
    "StreamIntervention": "interventions",
    "ThreadedHookLLM": "threaded",
    "TransformersBackend": "transformers_backend",
    "UnsupportedModelError": "errors",
    "UnsupportedVLLMError": "errors",
    "Vector": "vectors",
    "load_config": "config",
    "load_states": "state_files",
}

__all__ = [
    "Ablate",
    "AddVector",
    "Analyzed",
    "Analyzer",
    "AsyncCaptureBackend",
    "AsyncHookLLM",
    "AttentionProbe",
    "AttentionTemplate",
    "BridgedHookLLM",
    "Capture",
    "CaptureBackend",
    "CaptureRequest",
    "ClosedError",
    "ConfigError",
    "EngineDeadError",
    "GeneratingBackend",
    "Head",
    "HeadIntervention",
    "HeadOutputProbe",
    "HiddenStateProbe",
    "HookLLM",
    "HookRuntimeError",
    "IncompleteCaptureError",
    "Intervention",
    "ModelInfo",
    "Performed",
    "ProbeError",
    "Probed",
    "Program",
    "ProgramConfig",
    "ProgramError",
    "ProgramInfo",
    "ProjectTo",
    "Reading",
    "ScaleHeads",
    "ShadowMemoryError",
    "StateProbe",
    "States",
    "StreamIntervention",
    "ThreadedHookLLM",
    "TransformersBackend",
    "UnsupportedModelError",
    "UnsupportedVLLMError",
    "Vector",
    "load_config",
    "load_states",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
