"""Which tokens of a request a probe reads or an intervention changes, as spans of positions."""

from __future__ import annotations

from typing import Any, Literal

from .errors import ProbeError
from .specs import as_span

Positions = Literal["all", "prompt", "generated", "last"] | tuple[int, int]
NAMED = ("all", "prompt", "generated", "last")
Reach = tuple[int, int | None]
"""Half-open positions; None where they go on for as long as the request generates."""


def parse_positions(value: Any) -> Positions:
    """Check ``"all"``, ``"prompt"``, ``"generated"``, ``"last"`` or a span (start, end)."""
    if isinstance(value, str) and value in NAMED:
        return value  # type: ignore[return-value]
    span = as_span(value)
    if span is None:
        raise ProbeError(
            f"positions {value!r}: expected 'all', 'prompt', 'generated', 'last' (of the prompt) "
            "or a half-open span of token positions (start, end), 0 <= start < end."
        )
    return span


def check_steps(start: Any, stop: Any) -> None:
    """Raise ProbeError unless ``start`` and ``stop`` are steps, ``stop`` None or past ``start``."""
    for name, value in (("start_step", start), ("stop_step", stop)):
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        if not whole and not (name == "stop_step" and value is None):
            raise ProbeError(f"{name}={value!r}: expected a step counted from zero.")
    if stop is not None and stop <= start:
        raise ProbeError(f"no step lies between start_step={start} and stop_step={stop}.")


def reach(
    positions: Positions, prompt_len: int, start_step: int = 0, stop_step: int | None = None
) -> Reach | None:
    """The token positions meant, for a prompt of so many tokens; None where there are none.

    Step 0 computes the prompt and samples the first token; step k computes the k-th generated
    token, at position ``prompt_len + k - 1``.
    """
    if isinstance(positions, tuple):
        low, high = positions[0], positions[1]
    else:
        low = {"generated": prompt_len, "last": prompt_len - 1}.get(positions, 0)
        high = None if positions in ("all", "generated") else prompt_len
    if start_step > 0:
        low = max(low, prompt_len + start_step - 1)
    if stop_step is not None:
        end = prompt_len + stop_step - 1
        high = end if high is None else min(high, end)
    return None if high is not None and high <= low else (low, high)


def depends_on_prompt_length(
    positions: Positions, start_step: int = 0, stop_step: int | None = None
) -> bool:
    """Whether equal tokens at equal positions may be meant in one prompt and not in another."""
    steps = start_step > 0 or stop_step is not None
    return steps or not (positions == "all" or isinstance(positions, tuple))
