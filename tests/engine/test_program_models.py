"""Programs on every architecture: tiny random models, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from program_oracle import assert_ran
from program_runs import greedy, run_programs, tokens

from hook_runtime.engine import HookLLM
from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

pytestmark = pytest.mark.engine


def test_states_and_interventions(tiny: tuple[Path, HookLLM]) -> None:
    """Longer than a chunk and than every window, with generation."""
    folder, engine = tiny
    config = engine.llm.llm_engine.vllm_config.model_config.hf_text_config
    direction = np.random.default_rng(0).standard_normal(config.hidden_size)
    probes = (
        HiddenStateProbe("all", positions="all"),
        HeadOutputProbe(["0-1", "1-2", "3-3"], positions="all"),
    )
    steering = [
        ScaleHeads(["0-1", "2-3"], 0.3),
        AddVector([0], direction, 0.5),
        Ablate([1, 2], direction, positions="generated"),
        ProjectTo([3], direction, 2.0),
    ]
    prompts = [tokens(160, seed=1), tokens(90, seed=2)]
    programs = [Program(probes, steering), Program(probes)]
    found = run_programs(engine, prompts, programs, greedy(5))
    for ran, prompt in zip(found, prompts, strict=True):
        assert_ran(folder, ran, len(prompt), tolerance=1e-3)
