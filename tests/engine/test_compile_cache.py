"""What vLLM keeps of a compiled model: the next start loads it, unless it is another model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import start_engine
from oracle import reference_attention
from parity import assert_exact

from hook_runtime.specs import AttentionProbe, CaptureRequest, Head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("in_this_process")]


def test_a_second_start_compiles_nothing_and_another_model_is_another(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 on a CPU takes its own file for a broken one and compiles again, for 45 s of
    SmolLM2's start."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    from vllm.compilation.counter import compilation_counter as counter

    folder = tiny_model("llama")
    heads = (Head(0, 1), Head(1, 2))
    requests = [
        CaptureRequest(tuple(range(20, 80)), AttentionProbe(heads, (50, 60), ((4, 20), (20, 45))))
    ]
    expected = reference_attention(folder, requests)

    def start(**how: Any) -> tuple[int, int]:
        """How many models were compiled and loaded for it."""
        before = counter.num_aot_compiles, counter.num_aot_artifacts_loaded
        with start_engine(folder, **how) as engine:
            assert_exact(engine.capture(requests), expected, requests)
        return (
            counter.num_aot_compiles - before[0],
            counter.num_aot_artifacts_loaded - before[1],
        )

    compiled, loaded = (1, 0), (0, 1)
    assert start() == compiled
    assert start() == loaded
    assert start(layers=3) == compiled
    assert start(programs=True) == compiled
    assert start(layers=3) == loaded
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another's")
    assert start() == compiled
