"""Run programs on an engine, and keep what the reference needs to know of each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hook_runtime.engine import HookLLM
from hook_runtime.probes import States
from hook_runtime.programs import Program


class Ran(NamedTuple):
    """One request: what was computed of prompt and generation, output, states and program."""

    tokens: list[int]
    output: Any
    states: tuple[States, ...]
    program: Program


def run_programs(
    engine: HookLLM,
    prompts: Sequence[Sequence[int]],
    programs: Sequence[Program | None],
    params: Any,
    **how: Any,
) -> list[Ran]:
    """One batch, in which requests with None are ordinary ones."""
    sent = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
    found = []
    for tokens, program, done in zip(
        prompts, programs, engine.perform(sent, programs, params, **how), strict=True
    ):
        assert engine._conductor is not None
        resolved = Program() if program is None else engine._conductor.resolve(program)
        computed = [*tokens, *done.reading.token_ids[:-1]]
        found.append(Ran(computed, done.output, done.reading.states, resolved))
    return found
