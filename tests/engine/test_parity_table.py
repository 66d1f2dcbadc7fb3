"""Rows of the parity table that no other test covers: scheduling modes, LoRA, several workers.

They run as ``make parity`` runs them, in processes of their own.
"""

from __future__ import annotations

import re
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
TESTED: dict[str, tuple[str, ...]] = {
    "tiny cache": ("prefix-evicted", "preempted"),
    "priority scheduling, tiny cache": ("preempted",),
    "no prefix cache": ("repeat", "mixed"),
    "async scheduling on": ("mixed", "last-chunk-of-one-token"),
    "chunks of 64, eager": ("last-query-token-alone", "cancelled"),
    "programs, compiled": ("programs",),
    "LoRA": ("lora",),
    "refused: fp8 KV cache": ("refusal",),
    "refused: MLA": ("refusal",),
    "pipeline parallel 2, compiled": ("repeat", "mixed"),
}
"""Conditions by engine; engines that may share a process follow each other."""
REFUSALS = {
    "refused: fp8 KV cache": r"its KV cache holds fp8, not the model's float32",
    "refused: MLA": r"no decoder self-attention with readable keys .*MLAAttention",
}


@pytest.fixture(scope="module")
def driver(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    models = Models(tmp_path_factory.mktemp("parity"), smollm2_dir, smollm2_dir)
    stamp = {"date": "", "commit": ""}
    with Driver(models, "cpu", 0, float("inf"), ROOT, stamp) as running:
        yield running


@pytest.mark.parametrize("name", TESTED)
def test_every_row_is_exact_or_refused(name: str, driver: Driver) -> None:
    (scenario,) = [s for s in SCENARIOS if s.name == name]
    rows = [r for r in planned(scenario, "cpu") if r.condition in TESTED[name]]
    driver.run([(scenario, rows)])
    if name in REFUSALS:
        (row,) = rows
        assert re.match(f"refused: UnsupportedModelError: .*{REFUSALS[name]}", row.verdict)
    else:
        assert {r.condition: r.verdict for r in rows} == dict.fromkeys(TESTED[name], "ok")
