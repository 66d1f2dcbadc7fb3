"""The name that a model of ours has in vLLM's compile cache, so that no other is loaded for it.

vLLM's key holds its config and environment, and of sources what was traced. It lacks what decides
untraced how the model is built (this package, a user's own worker) and the processor: code for
AVX-512 is loaded without complaint where there is only AVX2, and computes garbage.
"""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import compat

_NOT_THE_USERS = ("builtins", "hook_runtime", "torch", "vllm")


def name_compiled_model(vllm_config: Any, worker: type) -> None:
    """Before ``worker`` compiles the model, in its process; on a CPU, let it load what it kept.

    Nothing changes where the user's ``additional_config`` is no dict: there is no other way to the
    key.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return
    digest = hashlib.sha256("\0".join(_made_of(worker)).encode()).hexdigest()
    vllm_config.additional_config = {**extra, compat.COMPILED_MODEL: digest}
    if compat.is_cpu():
        compat.let_compiled_model_load()


def _made_of(worker: type) -> Iterator[str]:
    for path in sorted(Path(__file__).parent.glob("*.py")):
        yield path.read_text(encoding="utf-8")
    for part in worker.__mro__:
        if part.__module__.partition(".")[0] not in _NOT_THE_USERS:
            yield f"{part.__module__}.{part.__qualname__}"
            yield _source(part)
    if compat.is_cpu():
        yield from _processor()


def _source(part: type) -> str:
    """Of the file that a user's class is in."""
    try:
        return Path(inspect.getfile(part)).read_text(encoding="utf-8")
    except (OSError, TypeError):  # written in a notebook, say
        return ""


def _processor() -> Iterator[str]:
    """What its instructions are, and which of them torch uses."""
    import torch

    yield torch.backends.cpu.get_cpu_capability()
    yield platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    yield from sorted({line for line in lines if line.startswith(("flags", "Features"))} or lines)
