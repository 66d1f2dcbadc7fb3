"""Writes files whole or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PARTIAL = ".partial"


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace ``path`` in one step, text in UTF-8; safe from a crash of the machine too.

    A process that is killed meanwhile leaves a hidden file beside it that ends in `PARTIAL`.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    writer = f"{os.getpid()}-{threading.get_ident()}"
    partial = path.with_name(f".{path.name}.{writer}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_yaml(path: Path, plain: Mapping[str, Any]) -> None:
    """Write YAML as `write_whole` does, keys in the order given."""
    import yaml

    write_whole(path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=99))
