"""An evaluation on real engines: early exit, the whole model, and generation on the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engines import DEFAULTS
from evaluations import DATA, TOPICS, run_file

from core_rerank.eval import attention_system, evaluate, find_candidates, name_systems

pytestmark = pytest.mark.engine


def test_systems_on_real_engines_one_at_a_time(smollm2_dir: Path, tmp_path: Path) -> None:
    candidates = find_candidates(DATA, f"run:{run_file(tmp_path)}", 5)
    main = attention_system(str(smollm2_dir), **DEFAULTS)
    systems = name_systems(main, ["listwise", "icr", "rankgpt", "fusion"])
    report = evaluate(DATA, systems, candidates, output=tmp_path / "out", batch=4)
    assert not any(system.failed for system in report.systems)
    assert report["core"].facts["layers_kept"] == 19
    assert report["icr"].facts["layers_kept"] == report["rankgpt"].facts["layers_kept"] == 30
    first = report["first-stage"].means["nDCG@10"]
    assert report["core"].means["nDCG@10"] > first  # easy questions, the right one second
    assert report["icr"].means["nDCG@10"] > first
    rankgpt = report["rankgpt"]
    assert all(len(scores) == 5 for scores in rankgpt.run.values())
    assert rankgpt.cost.output_tokens > 0
    assert report["core"].cost.input_tokens > report["listwise"].cost.input_tokens > 0
    assert set(report["core+rrf"].run["q-tides"]) <= set(TOPICS)

    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    again = evaluate(DATA, systems, candidates, output=tmp_path / "out", batch=4)
    assert [s.means for s in again.systems] == [s["measures"] for s in metrics["systems"]]
