"""The scaling table without GPUs: sizes, efficiency, faults, the 70B shape's heads."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from core_rerank.eval import bench_scale, gpu_rows, shapes
from core_rerank.eval.bench_report import Report, Row
from core_rerank.eval.gpu_engines import Engines
from core_rerank.eval.gpu_rows import Load
from core_rerank.eval.timing import summarise
from hook_runtime.specs import Head


class Split(Engines):
    """Engines of which each GPU more takes away a fixed part of the time."""

    @contextmanager
    def hooked(self, *, early_exit: bool, **more: Any) -> Any:
        assert early_exit
        model = SimpleNamespace(device="gpu", dtype="bfloat16", layers_kept=46)
        capture = SimpleNamespace(values=np.zeros((1, 5000), np.float32))
        yield SimpleNamespace(
            model=model,
            size=more["tensor_parallel_size"],
            tokenizer=range(1000),
            capture=lambda requests: [capture] * len(requests),
        )


def measured(hooked: Any, *_: Any) -> list[Row]:
    taken = [8.0 / hooked.size**0.5] * 3
    row = Row("captured / plain", summarise(taken, taken), "none", 0, 9, 8, "queries")
    return [row]


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    async def no_gpu(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no GPU")

    monkeypatch.setattr("hook_runtime.AsyncHookLLM.start", no_gpu)
    monkeypatch.setattr(gpu_rows, "captured_against_plain", measured)
    engines = Split(tmp_path, (Head(3, 1),), {})
    settings = bench_scale.Settings(engines, engines, Load(), 4, 1e9)
    made = Report({}, tmp_path / "scale.json")
    bench_scale.ScaleBench(settings, made, lambda: None).run()
    return made


def test_every_size_is_measured_and_set_against_linear(report: Report) -> None:
    assert [row.claim.split(":")[0] for row in report.rows] == [
        f"tensor parallel {size}" for size in (1, 2, 4)
    ]
    share = [f.value for f in report.figures if "linear" in f.name]
    assert share == pytest.approx([1, 2**-0.5, 0.5])
    returned = [f.value for f in report.figures if "returned" in f.name]
    assert returned == [2 * 5000 * 4] * 3


def test_a_fault_costs_its_phase_alone(report: Report) -> None:
    assert report.missing == {"data parallel": "failed: RuntimeError: no GPU"}


def test_sizes() -> None:
    assert bench_scale.counts(1) == [1]
    assert bench_scale.counts(8) == [1, 2, 4, 8]
    assert bench_scale.counts(6) == [1, 2, 4, 6]
    with pytest.raises(ValueError, match="at least 1, not 0"):
        bench_scale.counts(0)


def test_the_70b_shape_can_be_split_and_has_its_heads(tmp_path: Path, smollm2_dir: Path) -> None:
    engines = Engines(
        shapes.llama_70b(tmp_path, smollm2_dir),
        tuple(map(Head.parse, shapes.MIDDLE_HEADS_70B)),
        {},
    )
    config = engines.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (80, 64)
    assert config.num_key_value_heads % 8 == 0
    assert len(set(engines.heads)) == 16
    assert engines.exit_layers == 46
    assert all(head.head < 64 for head in engines.heads)
