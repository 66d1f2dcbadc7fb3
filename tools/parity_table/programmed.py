"""The condition of programs: requests that are read and steered, beside others and a capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from program_oracle import assert_states, mean_distance, reference_states
from program_runs import Ran, run_programs, tokens
from prompts import QUERIES

from hook_runtime.interventions import Ablate, AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program
from hook_runtime.specs import Head

from .mixed import near_tie, ordinary_outputs_differ
from .session import Observed, Session, greedy

ROUNDING_FACTOR = 2.0
"""In bf16 a layer's states may be off by this many times what plain transformers is off by."""


def programs(session: Session) -> Observed:
    """Prompt and decode steps of four programs, two ordinary requests, then a capture."""
    seen = Observed()
    given = _programs(int(session.engine.llm.model_config.get_hidden_size()))
    prompts = [tokens(50 + 10 * i, seed=i) for i in range(len(given))]
    params = greedy(12, logprobs=5, ignore_eos=True)
    session.cold()
    plain = run_programs(session.engine, prompts, [None] * len(given), params)
    session.cold()
    ran = run_programs(session.engine, prompts, given, params)
    others = [i for i, program in enumerate(given) if program is None]
    ordinary_outputs_differ(
        seen,
        [plain[i].output for i in others],
        [ran[i].output for i in others],
        near_tie(session.model, session.dtype),
    )
    steered = [i for i, program in enumerate(given) if program and program.interventions]
    same = sum(_said(plain[i]) == _said(ran[i]) for i in steered)
    seen.notes.append(f"{same} of {len(steered)} steered answers are as they were")
    for one, program, prompt in zip(ran, given, prompts, strict=True):
        if program is not None:
            _compare(seen, session, one, len(prompt))
    session.capture(seen, session.products(QUERIES[0]))
    return seen


def _programs(width: int) -> Sequence[Program | None]:
    direction: Any = np.random.default_rng(0).standard_normal(width)
    read = (
        HiddenStateProbe("all", positions="all"),
        HeadOutputProbe((Head(0, 1), Head(2, 0)), positions="all"),
    )
    softer = ScaleHeads((Head(1, 1), Head(3, 0)), 0.3)
    return (
        Program(read, (AddVector((0, 2), direction, 0.5),)),
        None,
        Program(read, (Ablate((1,), direction), softer)),
        Program(read),
        Program(read, (ProjectTo((2,), direction, 2.0, positions="generated"),)),
        None,
    )


def _said(ran: Ran) -> list[int]:
    return list(ran.output.outputs[0].token_ids)


def _compare(seen: Observed, session: Session, ran: Ran, prompt_len: int) -> None:
    """Every state against transformers with the same hooks, given the tokens that were computed."""
    import torch

    asked = (session.model, ran.tokens, prompt_len, ran.program)
    exact = reference_states(*asked)
    if session.dtype == "float32":
        try:
            assert_states(ran.states, exact, ran.program.probes)
        except AssertionError as error:
            seen.problems.append(" ".join(str(error).split()) or "a state's shape is wrong")
        return
    rounded = reference_states(*asked, getattr(torch, session.dtype))
    for read, right, plain in zip(ran.states, exact, rounded, strict=True):
        if read.values.shape != right.shape:
            seen.problems.append(f"{read.probe}: {read.values.shape}, not {right.shape}")
            continue
        off = mean_distance(read.values, right)
        allowed = ROUNDING_FACTOR * mean_distance(plain, right)
        worst = int((off - allowed).argmax())
        if not off[worst] <= allowed[worst] + 1e-6:
            error = f"off by {off[worst]:.2e}, {allowed[worst]:.2e} allowed"
            seen.problems.append(f"{read.probe}: row {worst} is {error}")
