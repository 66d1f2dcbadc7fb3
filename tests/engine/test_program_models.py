"""Programs on every architecture: tiny random models, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_ran
from program_runs import greedy, run_programs, tokens
from tiny_models import ARCHITECTURES

from hook_runtime.engine import HookLLM
from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


@pytest.fixture(params=ARCHITECTURES)
def tiny(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    _in_this_process: None,
) -> Iterator[tuple[Path, HookLLM]]:
    folder = tiny_model(request.param)
    arguments: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 128}
    with start_engine(folder, **arguments) as engine:
        yield folder, engine


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
