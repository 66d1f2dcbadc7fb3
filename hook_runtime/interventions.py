"""What a request may have changed inside the model: the residual stream, or the heads' outputs.

A third party's own is a frozen dataclass that derives from `StreamIntervention` or
`HeadIntervention`, defines ``change`` and is named in the entry points (see `registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from .errors import ProbeError
from .positions import Positions, Reach, check_steps, parse_positions, reach
from .specs import Head, parse_heads, parse_layers
from .vectors import Vector

if TYPE_CHECKING:
    import torch

    Tensors = Callable[[Vector], torch.Tensor]
    """The vector's values on the worker's device, float32."""


@dataclass(frozen=True)
class Intervention:
    """What all interventions share.

    Attributes:
        positions: tokens that are changed: ``"all"``, ``"prompt"``, ``"generated"``, ``"last"`` (of
            the prompt), or a half-open span.
        start_step, stop_step: only tokens that these steps compute (half-open; None: to the end).
            Step 0 computes the prompt, step k the k-th generated token.
    """

    kind: ClassVar[str] = ""

    positions: Positions = field(default="all", kw_only=True)
    start_step: int = field(default=0, kw_only=True)
    stop_step: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", parse_positions(self.positions))
        check_steps(self.start_step, self.stop_step)

    def reach(self, prompt_len: int) -> Reach | None:
        """The positions changed in a request whose prompt has so many tokens."""
        return reach(self.positions, prompt_len, self.start_step, self.stop_step)

    def vectors(self) -> tuple[Vector, ...]:
        """The vectors that the workers need for it."""
        found = (getattr(self, f.name) for f in fields(self))
        return tuple(v for v in found if isinstance(v, Vector))


@dataclass(frozen=True)
class StreamIntervention(Intervention):
    """Changes what decoder layers give out, which the next layer takes in.

    Attributes:
        layers: decoder layers, from zero, or ``"all"``. The output of layer i is transformers'
            ``hidden_states[i + 1]`` (of the last layer: before the final norm).
    """

    layers: tuple[int, ...] | Literal["all"]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", parse_layers(self.layers))

    def change(self, states: torch.Tensor, layer: int, tensors: Tensors) -> torch.Tensor:
        """New states [tokens, hidden] in place of these; float32 both."""
        raise NotImplementedError

    def _of_layer(self, vector: Vector, layer: int, tensors: Tensors) -> torch.Tensor:
        """The layer's own row where the vector has one a layer."""
        values = tensors(vector)
        if values.dim() == 1:
            return values
        assert self.layers != "all"
        return values[self.layers.index(layer)]

    def _check_rows(self, vector: Vector) -> None:
        rows = vector.values.shape[0] if vector.values.ndim == 2 else None
        if rows is not None and (self.layers == "all" or rows != len(self.layers)):
            named = "layers='all'" if self.layers == "all" else f"{len(self.layers)} layers"
            raise ProbeError(
                f"the vector has {rows} rows, one a layer, but the intervention names {named}."
            )


@dataclass(frozen=True)
class AddVector(StreamIntervention):
    """``h <- h + coefficient * vector``: activation addition.

    Attributes:
        vector: [hidden], or [layers, hidden] for one a layer, in the order of ``layers``.
    """

    kind: ClassVar[str] = "add_vector"

    vector: Vector
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vector", Vector.of(self.vector))
        object.__setattr__(self, "coefficient", _number("coefficient", self.coefficient))
        self._check_rows(self.vector)

    def change(self, states: torch.Tensor, layer: int, tensors: Tensors) -> torch.Tensor:
        return states + self.coefficient * self._of_layer(self.vector, layer, tensors)


@dataclass(frozen=True)
class ProjectTo(StreamIntervention):
    """``h <- h + (target - <h, u>) u`` with ``u = vector / |vector|``.

    The stream's projection on the direction becomes ``target`` (in the units of h); what is
    orthogonal to it stays.
    """

    kind: ClassVar[str] = "project_to"

    vector: Vector
    target: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vector", _direction(self.vector))
        object.__setattr__(self, "target", _number("target", self.target))
        self._check_rows(self.vector)

    def change(self, states: torch.Tensor, layer: int, tensors: Tensors) -> torch.Tensor:
        u = _unit(self._of_layer(self.vector, layer, tensors))
        return states + (self.target - states @ u)[:, None] * u


@dataclass(frozen=True)
class Ablate(StreamIntervention):
    """``h <- h - <h, u> u`` with ``u = vector / |vector|``: the direction is removed."""

    kind: ClassVar[str] = "ablate"

    vector: Vector

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "vector", _direction(self.vector))
        self._check_rows(self.vector)

    def change(self, states: torch.Tensor, layer: int, tensors: Tensors) -> torch.Tensor:
        u = _unit(self._of_layer(self.vector, layer, tensors))
        return states - (states @ u)[:, None] * u


@dataclass(frozen=True)
class HeadIntervention(Intervention):
    """Changes what attention heads give out, before the layer's output projection.

    Attributes:
        heads: attention heads, such as ``"3-5"`` or ``(3, 5)``: layer and head from zero.
    """

    heads: tuple[Head, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", parse_heads(self.heads))

    def change(self, outputs: torch.Tensor, head: Head, tensors: Tensors) -> torch.Tensor:
        """New outputs [tokens, head_dim] of one head in place of these; float32 both."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScaleHeads(HeadIntervention):
    """Each head's output times ``factor``: 0 knocks the heads out, above 1 amplifies them."""

    kind: ClassVar[str] = "scale_heads"

    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factor", _number("factor", self.factor))

    def change(self, outputs: torch.Tensor, head: Head, tensors: Tensors) -> torch.Tensor:
        return outputs * self.factor


def _number(name: str, value: Any) -> float:
    import math

    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ProbeError(f"{name}={value!r}: expected a finite number.")
    return float(value)


def _direction(value: Any) -> Vector:
    vector = Vector.of(value)
    rows = vector.values.reshape(-1, vector.width)
    if not rows.any(axis=1).all():
        raise ProbeError("a direction of zeros points nowhere.")
    return vector


def _unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()
