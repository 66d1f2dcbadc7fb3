"""Whether ordinary requests in a batch with captures got the tokens they get without any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .session import Observed

NEAR_TIE = 0.05
"""In bf16 two tokens whose log-probabilities differ by less than this may change places: a step
with a capture may run as another kind of CUDA graph, whose kernels add in another order."""


def ordinary_outputs_differ(
    seen: Observed, plain: Sequence[Any], probed: Sequence[Any], dtype: str
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
        text = (
            f"request {place} differs from its run without captures at token {at} (gap {gap:.3g})"
        )
        if dtype != "float32" and gap <= NEAR_TIE:
            seen.notes.append(f"{text}: a near tie")
        else:
            seen.problems.append(text)
    seen.notes.append(f"{same} of {len(plain)} outputs identical to the batch without captures")


def _gap(output: Any, at: int, other: Sequence[int]) -> float:
    """By how much the chosen token beat the other one, in nats, where nothing was captured."""
    known = output.outputs[0].logprobs[at]
    chosen = output.outputs[0].token_ids[at]
    if other[at] not in known:
        return float("inf")
    return known[chosen].logprob - known[other[at]].logprob
