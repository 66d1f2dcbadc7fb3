"""Programs under what the scheduler and the engine's modes may do: engines of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_ran, mean_distance, reference_greedy, reference_states
from program_runs import greedy, run_programs, tokens

from hook_runtime.errors import ProbeError
from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

pytestmark = pytest.mark.engine

DIRECTION = np.random.default_rng(7).standard_normal(576)
ADD = AddVector([4], DIRECTION, 1.5)
PROJECT = ProjectTo([10, 11], DIRECTION, 4.0, positions="generated")
ABLATE = Ablate("all", DIRECTION)
READ = (HiddenStateProbe("all", positions="all"), HeadOutputProbe(["2-1"], positions="all"))


def test_preemption(smollm2_dir: Path) -> None:
    """Requests are thrown out while they generate, and are computed again."""
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 256,
        "num_gpu_blocks_override": 13,
        "disable_log_stats": False,
    }
    with start_engine(smollm2_dir, **settings) as engine:
        prompts = [tokens(60, seed=i) for i in range(4)]
        program = Program(
            (*READ, HiddenStateProbe([9], positions="all", reduce="mean")),
            [ADD, PROJECT],
        )
        programs = [program, Program(READ), program, Program(READ)]
        ran = run_programs(engine, prompts, programs, greedy(70))
        metrics = engine.llm.get_metrics()
        assert sum(m.value for m in metrics if m.name == "vllm:num_preemptions") > 0
    for one in ran:
        assert_ran(smollm2_dir, one, 60)


@pytest.mark.parametrize(
    "how",
    [
        {"tensor_parallel_size": 2, "enforce_eager": True},
        # Compiled, since plain vLLM 0.32 on a CPU fails on an eager model in a pipeline.
        {"pipeline_parallel_size": 2, "programs": True},
    ],
    ids=lambda how: next(iter(how)),
)
def test_two_workers(
    how: dict[str, Any], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads or layers of both workers; a stream that both have, once."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = tiny_model("llama")
    direction = np.random.default_rng(1).standard_normal(192)
    program = Program(
        (
            HiddenStateProbe("all", positions="all"),
            HeadOutputProbe(["3-5", "0-0", "3-2", "1-3"], positions="all"),
        ),
        [ScaleHeads(["1-0", "2-4"], 2.0), Ablate([1], direction), AddVector([2], direction)],
    )
    with start_engine(folder, **how) as engine:
        (ran,) = run_programs(engine, [tokens(90, seed=1)], [program], greedy(4))
    assert_ran(folder, ran, 90)
    generated = list(ran.output.outputs[0].token_ids)
    assert generated == reference_greedy(folder, tokens(90, seed=1), ran.program, 4)


def test_bfloat16(smollm2_dir: Path) -> None:
    """Rounding to bf16 costs what it costs transformers: the bound is twice that."""
    import torch

    program = Program(READ[:1], [ADD, ABLATE])
    with start_engine(smollm2_dir, dtype="bfloat16", enforce_eager=True) as engine:
        (ran,) = run_programs(engine, [tokens(90, seed=15)], [program], greedy(4))
    exact, rounded = (
        reference_states(smollm2_dir, ran.tokens, 90, ran.program, dtype)[0]
        for dtype in (torch.float32, torch.bfloat16)
    )

    off = mean_distance(ran.states[0].values, exact)
    assert (off <= 2 * mean_distance(rounded, exact) + 1e-6).all()


def test_early_exit(smollm2_dir: Path) -> None:
    """Of the last layer kept only queries and keys are computed: its input can be read."""
    prompt = tokens(80, seed=9)
    with start_engine(smollm2_dir, layers=6, enforce_eager=True) as engine:
        (ran,) = run_programs(
            engine,
            [prompt],
            [Program((HiddenStateProbe("all", positions="prompt"),), AddVector([4], DIRECTION))],
            None,
        )
        assert ran.program.probes[0].layers == (0, 1, 2, 3, 4, 5)  # type: ignore[attr-defined]
        assert_ran(smollm2_dir, ran, 80)
        for beyond in (HiddenStateProbe([6]), HeadOutputProbe(["5-0"])):
            with pytest.raises(ProbeError, match=r"out of range|last one kept"):
                run_programs(engine, [prompt], [Program((beyond,))], None)
