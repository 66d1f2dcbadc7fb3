"""Programs where torch.compile hides the residual stream: doors, and what they leave untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from program_oracle import assert_ran
from program_runs import greedy, run_programs, tokens

from hook_runtime.engine import HookLLM
from hook_runtime.errors import UnsupportedVLLMError
from hook_runtime.interventions import AddVector, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

pytestmark = pytest.mark.engine

DIRECTION = np.random.default_rng(0).standard_normal(192)
PROMPTS = [tokens(90, seed=1), tokens(50, seed=2)]
PROBES = (
    HiddenStateProbe("all", positions="all"),
    HeadOutputProbe(["0-1", "3-3"], positions="all"),
)
PROGRAM = Program(PROBES, [AddVector([0, 2], DIRECTION, 0.5), ScaleHeads(["1-1"], 0.0)])


def _numbers(engine: HookLLM, programs: list[Program | None]) -> list[Any]:
    """Text, tokens and log-probabilities of requests without a program."""
    found = []
    for ran, program in zip(
        run_programs(engine, PROMPTS, programs, greedy(logprobs=5)), programs, strict=True
    ):
        if program is None:
            (done,) = ran.output.outputs
            steps = [{t: p.logprob for t, p in step.items()} for step in done.logprobs]
            found.append([done.text, list(done.token_ids), steps])
    return found


def _check(folder: Path, engine: HookLLM) -> None:
    assert engine.llm.reset_prefix_cache()
    ran = run_programs(engine, PROMPTS, [PROGRAM, Program(PROBES)], greedy(logprobs=5))
    for one, prompt in zip(ran, PROMPTS, strict=True):
        assert_ran(folder, one, len(prompt))


def test_doors_in_a_compiled_model(tiny_model: Callable[[str], Path]) -> None:
    """The second engine finds the first one's compiled model in vLLM's and torch's caches."""
    folder = tiny_model("llama")
    with start_engine(folder) as engine:
        heads_only = Program(PROBES[1:], ScaleHeads(["1-1"], 0.0))
        (ran, _) = run_programs(engine, PROMPTS, [heads_only, None], greedy(logprobs=5))
        assert_ran(folder, ran, len(PROMPTS[0]))
        with pytest.raises(UnsupportedVLLMError, match="programs=True"):
            run_programs(engine, PROMPTS, [PROGRAM, None], greedy(logprobs=5))
        assert engine.llm.reset_prefix_cache()
        unhooked = _numbers(engine, [None, None])
    for _ in range(2):
        with start_engine(folder, programs=True) as engine:
            assert _numbers(engine, [None, None]) == unhooked
            assert engine.llm.reset_prefix_cache()
            assert _numbers(engine, [PROGRAM, None]) == unhooked[1:]
            _check(folder, engine)


def test_doors_in_a_model_that_is_cut_and_compiled(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    probe = HiddenStateProbe("all", positions="prompt")
    program = Program((probe,), AddVector([0], DIRECTION, 0.5))
    with start_engine(folder, programs=True, layers=3) as engine:
        for one in run_programs(engine, PROMPTS, [program] * 2, None):
            assert one.states[0].values.shape[0] == 3
            assert_ran(folder, one, len(one.tokens))
