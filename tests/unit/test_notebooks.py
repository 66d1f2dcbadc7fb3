"""The notebooks as they are kept: run from top to bottom, pictures inside, nothing of a machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept(path: Path) -> None:
    cells = read(path)
    assert "".join(cells[0]["source"]).startswith("# ")
    assert "You get:" in "".join(cells[0]["source"])
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert all(output.get("name") != "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_path_of_a_machine_is_in_them(path: Path) -> None:
    for cell in read(path):
        shown = [cell["source"], *(o.get("text", "") for o in cell.get("outputs", []))]
        shown += [o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
        for text in map("".join, shown):
            assert not re.search(r"/(home|work|root|tmp|Users|usr|opt)/", text), text
