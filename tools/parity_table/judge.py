"""Compares captures with transformers eager, and says what error is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from oracle import reference_attention
from parity import FLOAT32_TOLERANCE, HEAD_TOLERANCE, ranking, relative_error

from hook_runtime.specs import CaptureRequest

from .session import Part

ROUNDING_FACTOR = 1.25
"""In bf16 captures may be off, by root mean square, by this many times what plain transformers in
bf16 is off by on the same prompts."""
LARGEST_FACTOR = 2.0
"""The same of the largest difference, which a single value decides."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What one row is judged by.

    Attributes:
        error: largest difference from the float32 oracle, over the oracle's largest value; the
            worst of all captures.
        allowed: the most that ``error`` may be.
        head_error: the same within one head, the worst of all heads; float32 only.
        plain_error: ``error`` of plain transformers in the engine's dtype, worst of all prompts of
            the engine; None in float32.
        spread, plain_spread: root mean square of all differences, over the oracle's largest value,
            of the captures and of plain transformers on the same prompts; None in float32.
        agreeing, plain_agreeing, captures: how many captures (and plain runs) rank the spans as
            the oracle does, of how many.
    """

    error: float
    allowed: float
    head_error: float | None
    plain_error: float | None
    agreeing: int
    plain_agreeing: int | None
    captures: int
    spread: float | None = None
    plain_spread: float | None = None

    def fault(self) -> str:
        """What is wrong with the captures, if anything."""
        if not self.error <= self.allowed:
            return f"error {self.error:.2e}, {self.allowed:.2e} allowed"
        if self.spread is not None and self.plain_spread is not None:
            most = ROUNDING_FACTOR * self.plain_spread
            if not self.spread <= most:
                return f"root mean square {self.spread:.2e}, {most:.2e} allowed"
        if self.head_error is not None and not self.head_error <= HEAD_TOLERANCE:
            return f"a head is off by {self.head_error:.2e}, {HEAD_TOLERANCE:.0e} allowed"
        if self.plain_error is None and self.agreeing < self.captures:
            return f"{self.captures - self.agreeing} of {self.captures} rankings differ"
        return ""


@dataclass(slots=True)
class Oracle:
    """Remembers transformers' answers: most conditions ask for the same prompts."""

    device: str
    _known: dict[tuple[Path, str, CaptureRequest], np.ndarray] = field(default_factory=dict)

    def answers(self, parts: Iterable[Part], dtype: str = "float32") -> list[np.ndarray]:
        """What each part must show; in ``dtype``, where that is not float32, what rounding makes
        of it."""
        parts = list(parts)
        for model in dict.fromkeys(p.model for p in parts):
            asked = dict.fromkeys(p.request for p in parts if p.model == model)
            new = [r for r in asked if (model, dtype, r) not in self._known]
            if new:
                values = self._read(model, new, dtype)
                self._known.update({(model, dtype, r): v for r, v in zip(new, values, strict=True)})
        return [self._known[p.model, dtype, p.request] for p in parts]

    def _read(self, model: Path, requests: Sequence[CaptureRequest], dtype: str) -> Any:
        import torch

        if dtype == "float32":
            return reference_attention(model, requests)
        where = "cuda" if self.device == "gpu" else "cpu"
        return reference_attention(model, requests, getattr(torch, dtype), where)

    def plain_error(self, parts: Sequence[Part], dtype: str) -> float | None:
        """Worst error of plain transformers in ``dtype`` over the prompts of these parts."""
        if dtype == "float32" or not parts:
            return None
        pairs = zip(self.answers(parts, dtype), self.answers(parts), strict=True)
        return max(relative_error(rounded, exact) for rounded, exact in pairs)

    def misfit(self, parts: Sequence[Part]) -> str:
        """How a capture's shape, type or heads are not what its probe asked for, if so."""
        for part, exact in zip(parts, self.answers(parts), strict=True):
            got, heads = part.capture.values, part.request.probe.heads
            if got.shape != exact.shape or got.dtype != exact.dtype:
                return f"a capture is {got.dtype} {got.shape}, not {exact.dtype} {exact.shape}"
            if heads != "all" and part.capture.heads != heads:
                return f"a capture holds heads {part.capture.heads}, not {heads}"
        return ""

    def figures(self, parts: Sequence[Part], dtype: str, plain_error: float | None) -> Figures:
        """Figures of one condition's captures; ``plain_error`` is the whole engine's."""
        exact = self.answers(parts)
        got = [p.capture.values for p in parts]
        orders = [ranking(e, p.request) for e, p in zip(exact, parts, strict=True)]
        return Figures(
            error=_worst(map(relative_error, got, exact)),
            allowed=FLOAT32_TOLERANCE if plain_error is None else LARGEST_FACTOR * plain_error,
            head_error=_worst(map(_head_error, got, exact)) if plain_error is None else None,
            plain_error=plain_error,
            agreeing=_agreeing(got, parts, orders),
            plain_agreeing=(
                None
                if plain_error is None
                else _agreeing(self.answers(parts, dtype), parts, orders)
            ),
            captures=len(parts),
            spread=None if plain_error is None else _spread(got, exact),
            plain_spread=(
                None if plain_error is None else _spread(self.answers(parts, dtype), exact)
            ),
        )


def _worst(errors: Iterable[float]) -> float:
    """The largest, where one that is not a number counts as infinite."""
    return max(e if np.isfinite(e) else float("inf") for e in errors)


def _spread(got: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """Root mean square of all differences, each over its oracle's largest value."""
    parts = [((g - e) / np.abs(e).max()).ravel() for g, e in zip(got, exact, strict=True)]
    spread = float(np.sqrt(np.mean(np.square(np.concatenate(parts), dtype=np.float64))))
    return spread if np.isfinite(spread) else float("inf")


def _head_error(got: np.ndarray, exact: np.ndarray) -> float:
    return float((np.abs(got - exact).max(axis=1) / (np.abs(exact).max(axis=1) + 1e-5)).max())


def _agreeing(values: Sequence[np.ndarray], parts: Sequence[Part], orders: Any) -> int:
    found = (ranking(v, p.request) for v, p in zip(values, parts, strict=True))
    return sum(a == b for a, b in zip(found, orders, strict=True))
