"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text in UTF-8), replacing ``path`` in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
