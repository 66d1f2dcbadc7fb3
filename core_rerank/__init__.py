"""Rerank documents by the attention of an LLM's retrieval heads."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hook_runtime.specs import AttentionProbe, Head

    from .errors import (
        ClosedError,
        CoreRerankError,
        HeadSetError,
        MissingDependencyError,
        ModelError,
        NotFiniteError,
        PromptError,
    )
    from .fusion import fuse
    from .heads import HeadSet
    from .injection import Detection, Guarded, InjectionDetector
    from .injection_heads import InjectionHeads
    from .reranker import Reranker
    from .shared import rerank
    from .steering import SteeringVector
    from .types import Document, RankedDocument, Ranking, TokenScore

    __version__: str

_MODULE_OF = {
    "AttentionProbe": "hook_runtime.specs",
    "ClosedError": "core_rerank.errors",
    "CoreRerankError": "core_rerank.errors",
    "Detection": "core_rerank.injection",
    "Document": "core_rerank.types",
    "Guarded": "core_rerank.injection",
    "Head": "hook_runtime.specs",
    "HeadSet": "core_rerank.heads",
    "HeadSetError": "core_rerank.errors",
    "InjectionDetector": "core_rerank.injection",
    "InjectionHeads": "core_rerank.injection_heads",
    "MissingDependencyError": "core_rerank.errors",
    "ModelError": "core_rerank.errors",
    "NotFiniteError": "core_rerank.errors",
    "PromptError": "core_rerank.errors",
    "RankedDocument": "core_rerank.types",
    "Ranking": "core_rerank.types",
    "Reranker": "core_rerank.reranker",
    "SteeringVector": "core_rerank.steering",
    "TokenScore": "core_rerank.types",
    "fuse": "core_rerank.fusion",
    "rerank": "core_rerank.shared",
}

__all__ = [
    "AttentionProbe",
    "ClosedError",
    "CoreRerankError",
    "Detection",
    "Document",
    "Guarded",
    "Head",
    "HeadSet",
    "HeadSetError",
    "InjectionDetector",
    "InjectionHeads",
    "MissingDependencyError",
    "ModelError",
    "NotFiniteError",
    "PromptError",
    "RankedDocument",
    "Ranking",
    "Reranker",
    "SteeringVector",
    "TokenScore",
    "__version__",
    "fuse",
    "rerank",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    if name == "__version__":
        return _version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("core-rerank")
    except PackageNotFoundError:
        return "0+uninstalled"
