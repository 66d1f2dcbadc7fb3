"""What vLLM keeps of a compiled model: the next start loads it, and it captures the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import start_engine
from oracle import reference_attention
from parity import assert_exact

from hook_runtime.specs import AttentionProbe, CaptureRequest

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("in_this_process")]


def test_a_second_start_compiles_nothing(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.32 on a CPU takes its own file for a broken one and compiles again, for 45 s of
    SmolLM2's start."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    from vllm.compilation.counter import compilation_counter as counter

    folder = tiny_model("llama")
    probe = AttentionProbe("all", (50, 60), ((4, 20), (20, 45)))
    requests = [CaptureRequest(tuple(range(20, 80)), probe)]
    expected = reference_attention(folder, requests)
    done = [(counter.num_aot_compiles, counter.num_aot_artifacts_loaded)]
    for _ in range(2):
        with start_engine(folder) as engine:
            assert_exact(engine.capture(requests), expected, requests)
        done.append((counter.num_aot_compiles, counter.num_aot_artifacts_loaded))
    (compiled, loaded), first, second = done
    assert first == (compiled + 1, loaded)
    assert second == (compiled + 1, loaded + 1)
