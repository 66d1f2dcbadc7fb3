"""Folders, names and whole files for results; JSON values as text, as a hash, and compared."""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

from core_rerank.errors import DataError
from core_rerank.files import write_whole as write_whole


def make_folder(folder: Path) -> None:
    """A folder for results, and those above it; DataError where a file is in its place."""
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: give a folder for the results.")
    folder.mkdir(parents=True, exist_ok=True)


def file_name(name: str) -> str:
    """A system's name as part of a file's: ``cross-encoder:org/m`` is ``cross-encoder-org-m``."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "system"


def to_json(value: Any) -> str:
    """JSON on one line, keys sorted; what JSON has no form for is written as ``str`` writes it."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def digest(value: Any) -> str:
    """A hash of what ``to_json`` writes, in 16 hexadecimal digits."""
    return blake2b(to_json(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def differences(there: Any, now: Any, name: str = "") -> list[str]:
    """What differs between two JSON values, one text each: ``depth was 20, now 40``."""
    if isinstance(there, dict) and isinstance(now, dict):
        found = []
        for key in dict.fromkeys([*there, *now]):
            inner = f"{name}.{key}" if name else str(key)
            found += differences(there.get(key), now.get(key), inner)
        return found
    return [] if there == now else [f"{name} was {_short(there)}, now {_short(now)}"]


def _short(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
