"""The quickstart notebook runs from top to bottom (here on the transformers backend)."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"


def test_quickstart(
    smollm2_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = types.ModuleType("IPython.display")
    display.IFrame = lambda path, **_: path  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            source = "".join(cell["source"])
            exec(source.replace("Reranker()", "Reranker(backend='transformers')"), names)
    said = capsys.readouterr().out
    assert "on transformers, " in said
    assert "\n1.  " in said
    assert "which tide comes with the full moon? -> spring" in said
    assert "how does bread rise? -> bread" in said
    assert (tmp_path / "ranking.html").read_text(encoding="utf-8").startswith("<!doctype html>")
