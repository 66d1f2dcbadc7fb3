"""Run programs on an engine, and keep what the reference needs to know of each request.

Imports no reference: scripts that run on an engine of their own import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hook_runtime.engine import HookLLM
from hook_runtime.probes import States
from hook_runtime.programs import Program


class Ran(NamedTuple):
    """One request: what was computed of prompt and generation, output, states and program."""

    tokens: list[int]
    output: Any
    states: tuple[States, ...]
    program: Program


def tokens(length: int, seed: int = 0) -> list[int]:
    """Words from the vocabulary; the same seed gives prompts that share their beginning."""
    return np.random.default_rng(seed).integers(10, 40000, length).tolist()


def greedy(count: int = 6, **how: Any) -> Any:
    """Sampling parameters that generate ``count`` tokens, the likeliest each time."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **how)


def run_programs(
    engine: HookLLM,
    prompts: Sequence[Sequence[int]],
    programs: Sequence[Program | None],
    params: Any,
    **how: Any,
) -> list[Ran]:
    """One batch, in which requests with None are ordinary ones."""
    sent = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    found = []
    for prompt, program, done in zip(
        prompts, programs, engine.perform(sent, programs, params, **how), strict=True
    ):
        assert engine._conductor is not None
        resolved = Program() if program is None else engine._conductor.resolve(program)
        computed = [*prompt, *done.reading.token_ids[:-1]]
        found.append(Ran(computed, done.output, done.reading.states, resolved))
    return found
