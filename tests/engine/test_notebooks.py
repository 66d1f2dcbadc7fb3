"""Every notebook runs from top to bottom, on an engine of its own, and says what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

from notebooks import FOLDER, execute

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SAYS = {
    "01_rerank": ["of 30 layers loaded", "what must a ferry have on board? -> rules"],
    "02_find_heads": ["72 documents, 24 questions", "8 chosen", "Ada Brenn"],
    "03_injection": ["16 heads of", "refused", "dropped: [3, 5, 6]"],
    "04_steering": ["20 pairs, 29 layers", "type: add_vector", "projected, generated"],
    "05_beir": ["random-heads", "run-core.trec", "metrics.json"],
    "06_write_a_program": ["short.yaml: right", "('length',) ('limit',) by_layer", "[]"],
}


def said(notebook: Any) -> str:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    return "".join(out.get("text", "") for out in outputs)


def test_every_notebook_is_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(SAYS)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SAYS)
def test_notebook(name: str, smollm2_dir: Path, tmp_path: Path) -> None:
    text = said(execute(FOLDER / f"{name}.ipynb", tmp_path)).lower()
    for promised in SAYS[name]:
        assert promised.lower() in text, text
