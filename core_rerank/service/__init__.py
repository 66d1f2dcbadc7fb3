"""The HTTP service over one Reranker; needs the extra ``server``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from core_rerank.errors import MissingDependencyError

if TYPE_CHECKING:
    from .app import create_app
    from .server import Service, listen
    from .settings import ServiceSettings

_MODULE_OF = {
    "Service": "server",
    "ServiceSettings": "settings",
    "create_app": "app",
    "listen": "server",
}

__all__ = ["Service", "ServiceSettings", "create_app", "listen"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    except ImportError as error:
        raise MissingDependencyError(
            f"the service needs fastapi, uvicorn and prometheus-client ({error}). "
            "To install them: pip install 'core-rerank[server]'."
        ) from None
    return getattr(module, name)
