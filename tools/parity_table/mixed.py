"""Whether ordinary requests in a batch with captures got the tokens they get without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oracle import rounding_of_gaps

from .judge import LARGEST_FACTOR
from .session import Observed

Lead = Callable[[Any, int], float]
"""By how much the token at a place may have beaten another, in nats, and yet lose to it in a later
run of the request whose output is given."""


def near_tie(model: Path, dtype: str) -> Lead | None:
    """What rounding excuses: a step with a capture may run as another kind of CUDA graph or beside
    other requests, whose kernels add in another order. None in float32, which nothing excuses."""
    if dtype == "float32":
        return None
    import torch

    def lead(output: Any, at: int) -> float:
        prompt = list(output.prompt_token_ids)
        tokens = prompt + list(output.outputs[0].token_ids[: at + 1])
        changed = rounding_of_gaps(model, tokens, len(prompt), getattr(torch, dtype))
        return LARGEST_FACTOR * changed

    return lead


def ordinary_outputs_differ(
    seen: Observed, plain: Sequence[Any], probed: Sequence[Any], lead: Lead | None
) -> None:
    """Compare the tokens of the same batch without and with captures; notes what was found."""
    same = 0
    for place, (without, with_captures) in enumerate(zip(plain, probed, strict=True)):
        a, b = list(without.outputs[0].token_ids), list(with_captures.outputs[0].token_ids)
        if a == b:
            same += 1
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        gap = _gap(without, at, b) if at is not None else float("inf")
        text = f"request {place} differs from its run without captures at token {at}"
        if lead is None or at is None:
            seen.problems.append(f"{text} (gap {gap:.3g})")
            continue
        allowed = lead(without, at)
        found = f"{text} (gap {gap:.3g}, {allowed:.3g} by rounding)"
        (seen.notes if gap <= allowed else seen.problems).append(found)
    seen.notes.append(f"{same} of {len(plain)} outputs identical to the batch without captures")


def _gap(output: Any, at: int, other: Sequence[int]) -> float:
    """By how much the chosen token beat the other one, in nats, where nothing was captured."""
    known = output.outputs[0].logprobs[at]
    chosen = output.outputs[0].token_ids[at]
    if other[at] not in known:
        return float("inf")
    return known[chosen].logprob - known[other[at]].logprob
