"""What a request may have read inside the model beside attention: hidden states, heads' outputs.

A third party's own is a frozen dataclass that derives from `HiddenStateProbe` or `HeadOutputProbe`,
defines ``observe`` and is named in the entry points (see `registry`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from .errors import ProbeError
from .positions import Positions, Reach, parse_positions, reach
from .specs import Head, parse_heads, parse_layers

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class StateProbe:
    """What these probes share.

    Attributes:
        positions: tokens that are read: ``"last"`` (of the prompt), ``"prompt"``, ``"all"`` (the
            prompt and what is generated), ``"generated"``, or a half-open span. Of the generated
            tokens the last one is never computed by the model, so nothing is read there.
        reduce: ``"none"`` gives one row a token, ``"mean"`` their average.
    """

    kind: ClassVar[str] = ""

    positions: Positions = field(default="last", kw_only=True)
    reduce: Literal["none", "mean"] = field(default="none", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", parse_positions(self.positions))
        if self.reduce not in ("none", "mean"):
            raise ProbeError(f"reduce must be 'none' or 'mean', not {self.reduce!r}.")

    def reach(self, prompt_len: int) -> Reach | None:
        """The positions read in a request whose prompt has so many tokens."""
        return reach(self.positions, prompt_len)

    def observe(self, states: torch.Tensor) -> torch.Tensor:
        """What is kept of states [tokens, width]: as many rows, any width. All of it, here."""
        return states


@dataclass(frozen=True)
class HiddenStateProbe(StateProbe):
    """The residual stream, as transformers' ``hidden_states`` number it.

    Attributes:
        layers: indices into ``hidden_states``, or ``"all"``: 0 is the embeddings, i the output of
            decoder layer i - 1 and the last, with a whole model, the final norm's output.

    Interventions of the same request show: the stream is read as the next layer takes it in.
    """

    kind: ClassVar[str] = "hidden_state"

    layers: tuple[int, ...] | Literal["all"]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", parse_layers(self.layers))


@dataclass(frozen=True)
class HeadOutputProbe(StateProbe):
    """What attention heads give out, before the layer's output projection mixes them.

    Attributes:
        heads: attention heads, such as ``"3-5"`` or ``(3, 5)``: layer and head from zero.
    """

    kind: ClassVar[str] = "head_output"

    heads: tuple[Head, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", parse_heads(self.heads))


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What one probe read in one request.

    Attributes:
        probe: the probe, with ``"all"`` layers named.
        positions: half-open token positions that the rows stand for; with ``reduce="mean"`` those
            averaged.
        values: float32 [layers or heads, rows, width]: layers or heads in the probe's order, one
            row a position, or a single one with ``reduce="mean"`` (none where nothing was read).
    """

    probe: StateProbe
    positions: tuple[int, int]
    values: np.ndarray
