"""Rows of the parity table that no other test covers: scheduling modes, LoRA, several workers.

They run as ``make parity`` runs them, in processes of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from parity_table.drive import Driver
from parity_table.models import Models
from parity_table.scenarios import SCENARIOS
from parity_table.table import planned

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")

ROOT = Path(__file__).parents[2]
TESTED = (
    "tiny cache",
    "priority scheduling, tiny cache",
    "no prefix cache",
    "async scheduling on",
    "LoRA",
    "chunks of 64, eager",
    "pipeline parallel 2, compiled",
)
"""In an order in which engines that may share a process follow each other."""
FEWER = {
    "async scheduling on": ("mixed", "last-chunk-of-one-token"),
    "chunks of 64, eager": ("last-query-token-alone", "cancelled"),
    "pipeline parallel 2, compiled": ("repeat", "mixed"),
}


@pytest.fixture(scope="module")
def driver(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    models = Models(tmp_path_factory.mktemp("parity"), smollm2_dir, smollm2_dir)
    stamp = {"date": "", "commit": ""}
    with Driver(models, "cpu", 0, float("inf"), ROOT, stamp) as running:
        yield running


@pytest.mark.parametrize("name", TESTED)
def test_every_row_is_exact(name: str, driver: Driver) -> None:
    (scenario,) = [s for s in SCENARIOS if s.name == name]
    rows = planned(scenario, "cpu")
    rows = [r for r in rows if r.condition in FEWER.get(name, scenario.conditions)]
    driver.run([(scenario, rows)])
    assert {r.condition: r.verdict for r in rows} == {r.condition: "ok" for r in rows}
