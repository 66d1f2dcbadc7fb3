"""Files that are replaced in one step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from core_rerank.files import write_whole


def test_a_file_is_replaced_or_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    write_whole(path, b"\x00")
    assert path.read_bytes() == b"\x00"

    def refuse(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no room"):
        write_whole(path, "half")
    assert path.read_bytes() == b"\x00"
    assert os.listdir(tmp_path) == ["result.json"]
