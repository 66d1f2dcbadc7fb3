"""Start a real engine with small defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hook_runtime.engine import HookLLM

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 256 << 20,
}
TINY_CHUNK = 128  # tokens that engines on tiny models compute at a time


def start_engine(model: Path, **arguments: Any) -> HookLLM:
    """A HookLLM on ``model``; ``arguments`` win over the defaults."""
    return HookLLM(str(model), **{**DEFAULTS, **arguments})
