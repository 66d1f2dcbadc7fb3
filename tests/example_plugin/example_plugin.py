"""A probe, an intervention and an analyzer of another package; see its entry points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hook_runtime.analyzers import Analyzer, Reading
from hook_runtime.interventions import StreamIntervention
from hook_runtime.probes import HiddenStateProbe


@dataclass(frozen=True)
class StreamNorm(HiddenStateProbe):
    """The length of the residual stream: one number a token instead of all of them."""

    kind: ClassVar[str] = "stream_norm"

    def observe(self, states: torch.Tensor) -> torch.Tensor:
        return states.float().norm(dim=1, keepdim=True)


@dataclass(frozen=True)
class Shrink(StreamIntervention):
    """``h <- factor * h``."""

    kind: ClassVar[str] = "shrink"

    factor: float = 0.5

    def change(self, states: torch.Tensor, layer: int, tensors: Any) -> torch.Tensor:
        return self.factor * states


@dataclass(frozen=True)
class Largest(Analyzer):
    """The largest number that the first probe read."""

    kind: ClassVar[str] = "largest"

    def analyze(self, reading: Reading) -> float:
        return float(reading.states[0].values.max())
