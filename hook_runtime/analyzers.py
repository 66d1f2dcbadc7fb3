"""From what was read in one request to plain numbers: the built-in analyzers, and their base.

A third party's own is a frozen dataclass that derives from `Analyzer`, defines ``analyze`` and is
named in the entry points (see `registry`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .errors import ProbeError
from .probes import HiddenStateProbe, States
from .specs import AttentionProbe, Capture
from .vectors import Vector


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What was read in one request.

    Attributes:
        request_id: vLLM's.
        prompt_token_ids, token_ids: the prompt, and what was generated.
        attention, probe: what the attention probe read and the probe, if there was one.
        states: what each of the program's probes read, in order.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    attention: Capture | None
    probe: AttentionProbe | None
    states: tuple[States, ...]


@dataclass(frozen=True)
class Analyzer:
    """Turns a reading into what `HookLLM.analyze` gives; its fields are its parameters."""

    kind: ClassVar[str] = ""

    def analyze(self, reading: Reading) -> Any:
        """Numbers, strings, lists and dicts only, so that a server can send them on."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionMass(Analyzer):
    """The attention that lies on each span, averaged over the heads.

    ``{"spans": [...]}``, one number a span; their sum over the heads with ``sum_heads``.

    Attributes:
        normalize: divide by the spans' total, so that the numbers add up to one.
    """

    kind: ClassVar[str] = "attention_mass"

    normalize: bool = False

    def analyze(self, reading: Reading) -> dict[str, list[float]]:
        if reading.attention is None or reading.probe is None:
            raise ProbeError("attention_mass needs an attention probe, and this request has none.")
        mass = reading.attention.values.mean(axis=0, dtype=np.float64)
        if reading.probe.reduction == "tokens":
            starts = np.cumsum([0, *(end - start for start, end in reading.probe.spans[:-1])])
            mass = np.add.reduceat(mass, starts)
        if self.normalize:
            mass = mass / mass.sum()
        return {"spans": mass.tolist()}


@dataclass(frozen=True)
class Projection(Analyzer):
    """``<h, u>`` with ``u = vector / |vector|``: how far the stream goes along a direction.

    ``{"layers": [...], "positions": [start, end], "values": [[...], ...]}``, one list a layer.

    Attributes:
        vector: [hidden].
        probe: number of the hidden-state probe among the program's probes.
    """

    kind: ClassVar[str] = "projection"

    vector: Vector
    probe: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "vector", Vector.of(self.vector))
        if self.vector.values.ndim != 1 or not self.vector.values.any():
            raise ProbeError("projection needs one direction that is not zero.")

    def analyze(self, reading: Reading) -> dict[str, Any]:
        if not 0 <= self.probe < len(reading.states):
            raise ProbeError(
                f"projection: there is no probe {self.probe}; {len(reading.states)} were read."
            )
        states = reading.states[self.probe]
        if not isinstance(states.probe, HiddenStateProbe):
            raise ProbeError(f"projection: probe {self.probe} reads no hidden states.")
        if states.values.size == 0:
            raise ProbeError(
                f"projection: probe {self.probe} ({states.probe.positions!r}) read no token."
            )
        if states.values.shape[-1] != self.vector.width:
            raise ProbeError(
                f"projection: the vector has {self.vector.width} numbers, but probe {self.probe} "
                f"read {states.values.shape[-1]} a token."
            )
        direction = self.vector.values / np.linalg.norm(self.vector.values)
        return {
            "layers": list(states.probe.layers),
            "positions": list(states.positions),
            "values": (states.values @ direction).tolist(),
        }
