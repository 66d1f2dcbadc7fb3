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
    """Within, the package is installed in this process."""
    caches = (registry.find, registry._entry_points, config.schema)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        for cache in caches:
            cache.cache_clear()
        importlib.invalidate_caches()
        yield
    sys.modules.pop("example_plugin", None)
    for cache in caches:
        cache.cache_clear()
