"""The example package of ``tests/example_plugin``, installed where the running process finds it."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hook_runtime import config, registry

SOURCE = Path(__file__).parent / "example_plugin"


def install_plugin(folder: Path) -> Path:
    """Install it into ``folder / "site"``, as pip does for anybody."""
    copy = shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation"]
    target = folder / "site"
    done = subprocess.run(
        [*command, "--no-index", "--target", str(target), str(copy)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


@contextlib.contextmanager
def plugin_installed(site: Path) -> Iterator[None]:
    """Within, the packages in this folder are installed in this process."""
    caches = (registry.find, registry._entry_points, config.schema)
    before = set(sys.modules)
    with contextlib.ExitStack() as cleared, pytest.MonkeyPatch.context() as patch:
        for cache in caches:
            cleared.callback(cache.cache_clear)
        patch.syspath_prepend(str(site))
        for cache in caches:
            cache.cache_clear()
        importlib.invalidate_caches()
        try:
            yield
        finally:
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(site)):
                    del sys.modules[name]


def write_plugin(site: Path, name: str, code: str, points: dict[str, str]) -> None:
    """What pip leaves of a package of one module: ``points`` are "group.name": "class"."""
    (site / f"{name}.py").write_text(code, encoding="utf-8")
    info = site / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    lines = []
    for point, found in points.items():
        group, _, kind = point.partition(".")
        lines += [f"[hook_runtime.{group}]", f"{kind} = {name}:{found}"]
    (info / "entry_points.txt").write_text("\n".join(lines))
