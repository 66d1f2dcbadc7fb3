"""A program: what one request has read and changed inside the model; plain data on the wire."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from .errors import ProbeError
from .interventions import HeadIntervention, Intervention, StreamIntervention
from .positions import depends_on_prompt_length
from .probes import HeadOutputProbe, HiddenStateProbe, StateProbe
from .registry import Group, find
from .specs import ModelInfo
from .vectors import Vector

PROGRAM_VERSION = 1
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a program is checked against: the running model, and sizes a token has in it."""

    model: ModelInfo
    hidden_size: int
    head_dim: int

    @property
    def states(self) -> int:
        """Hidden states that can be read. The last layer kept of a cut model computes nothing."""
        cut = self.model.layers_kept < self.model.num_layers
        return self.model.layers_kept + (0 if cut else 1)

    @property
    def changeable(self) -> int:
        """Layers whose output can be changed."""
        return self.states - 1


@dataclass(frozen=True)
class Program:
    """Probes to read and interventions to make in one request; either may be empty.

    Attributes:
        probes: hidden-state and head-output probes (attention probes go with their prompts).
        interventions: applied in this order where several change the same layer or head; probes
            read what they leave.
    """

    probes: tuple[StateProbe, ...] = ()
    interventions: tuple[Intervention, ...] = ()

    def __post_init__(self) -> None:
        for name, kind in (("probes", StateProbe), ("interventions", Intervention)):
            items = getattr(self, name)
            items = (items,) if isinstance(items, kind) else tuple(items)
            object.__setattr__(self, name, items)
            for item in items:
                if not isinstance(item, kind):
                    raise ProbeError(f"{name} holds {item!r:.80}, which is no {kind.__name__}.")

    @functools.cached_property
    def needs_doors(self) -> bool:
        """Whether it reads or changes the residual stream, which compiled models hide."""
        kinds = (HiddenStateProbe, StreamIntervention)
        return any(isinstance(item, kinds) for item in (*self.probes, *self.interventions))

    @functools.cached_property
    def vectors(self) -> dict[str, Vector]:
        """What the workers must hold for it, by digest."""
        items: tuple[Any, ...] = (*self.interventions, *self.probes)
        found: dict[str, Vector] = {}
        for item in items:
            values = (getattr(item, f.name) for f in fields(item))
            found.update((v.digest, v) for v in values if isinstance(v, Vector))
        return found

    @functools.cached_property
    def wire(self) -> str:
        """The program as the workers read it; vectors by digest."""
        data = {
            "version": PROGRAM_VERSION,
            "probes": [_encode(p) for p in self.probes],
            "interventions": [_encode(i) for i in self.interventions],
        }
        return json.dumps(data, sort_keys=True)

    @functools.cached_property
    def digest(self) -> str:
        """Names what the program does to the model: equal for equal interventions."""
        data = json.dumps([_encode(i) for i in self.interventions], sort_keys=True)
        return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()

    def salt(self, prompt_len: int) -> str | None:
        """What keeps changed keys and values apart in the prefix cache; None where none are.

        The same tokens at the same places have the same keys under the same interventions, where
        these do not depend on where the prompt ends.
        """
        if not self.interventions:
            return None
        ends = any(
            depends_on_prompt_length(i.positions, i.start_step, i.stop_step)
            for i in self.interventions
        )
        return f"{self.digest}/{prompt_len}" if ends else self.digest

    def reads_prompt(self, prompt_len: int) -> bool:
        """Whether a probe reads prompt tokens that the prefix cache might spare from computing."""
        reaches = (p.reach(prompt_len) for p in self.probes)
        return any(r is not None and r[0] < prompt_len - 1 for r in reaches)

    def resolved(self, shape: ModelShape) -> Program:
        """With ``"all"`` layers named; ProbeError for what the model does not have."""
        program = Program(
            tuple(_named_layers(p, shape) for p in self.probes),
            tuple(_named_layers(i, shape) for i in self.interventions),
        )
        return self if program == self else program

    def capture_bytes(self, prompt_len: int, max_tokens: int, shape: ModelShape) -> int:
        """The most that its probes can bring back for a prompt of so many tokens.

        An own probe is taken to keep as many numbers a token as it sees.
        """
        size = 0
        for probe in self.probes:
            found = probe.reach(prompt_len)
            if found is None:
                continue
            low, high = found
            end = prompt_len + max_tokens - 1
            rows = max(0, (end if high is None else min(high, end)) - low)
            if isinstance(probe, HeadOutputProbe):
                width, count = shape.head_dim, len(probe.heads)
            else:
                assert isinstance(probe, HiddenStateProbe)
                every = probe.layers == "all"
                width, count = shape.hidden_size, shape.states if every else len(probe.layers)
            size += (1 if probe.reduce == "mean" else rows) * count * width * FLOAT32
        return size

    @classmethod
    def from_wire(cls, text: str, vectors: Mapping[str, Vector]) -> Program:
        """Inverse of ``wire``; ``vectors`` by digest. Validates as the constructors do."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != PROGRAM_VERSION:
            raise ProbeError(
                f"not a program of version {PROGRAM_VERSION}: {data!r:.80}. Use the same release "
                "of core-rerank on both sides."
            )
        return cls(
            tuple(_decode("probes", d, vectors) for d in data["probes"]),
            tuple(_decode("interventions", d, vectors) for d in data["interventions"]),
        )


def _encode(item: Any) -> dict[str, Any]:
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    return {"type": item.kind, **{n: _plain(v) for n, v in values.items()}}


def _plain(value: Any) -> Any:
    if isinstance(value, Vector):
        return {"vector": value.digest}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


def _decode(group: Group, data: dict[str, Any], vectors: Mapping[str, Vector]) -> Any:
    values = dict(data)
    kind = find(group, values.pop("type"))
    for name, value in values.items():
        if isinstance(value, dict) and value.keys() == {"vector"}:
            if value["vector"] not in vectors:
                raise ProbeError(f"this worker does not hold the vector {value['vector']}.")
            values[name] = vectors[value["vector"]]
        elif isinstance(value, list):
            values[name] = tuple(tuple(v) if isinstance(v, list) else v for v in value)
    return kind(**values)


def _named_layers(item: Any, shape: ModelShape) -> Any:
    model = shape.model
    if isinstance(item, HeadOutputProbe | HeadIntervention):
        model.check_heads(item.heads)
        cut = model.layers_kept < model.num_layers
        if cut and any(h.layer == model.layers_kept - 1 for h in item.heads):
            raise ProbeError(
                f"layer {model.layers_kept - 1} is the last one kept of {model.num_layers}: what "
                "its heads give out is not computed. Keep one layer more."
            )
        return item
    if isinstance(item, HiddenStateProbe):
        count, what = shape.states, "hidden states"
    elif isinstance(item, StreamIntervention):
        count, what = shape.changeable, "layers whose output can be changed"
    else:
        raise ProbeError(f"{type(item).__name__} is neither of the stream nor of heads.")
    if item.layers == "all":
        item = dataclasses.replace(item, layers=tuple(range(count)))
    for layer in cast(tuple[int, ...], item.layers):
        if layer >= count:
            raise ProbeError(
                f"{item.kind}: layer {layer} is out of range: {model.name} has {count} {what}, "
                f"0-{count - 1}."
            )
    if isinstance(item, StreamIntervention):
        _check_widths(item, shape)
    return item


def _check_widths(item: StreamIntervention, shape: ModelShape) -> None:
    for vector in item.vectors():
        if vector.width != shape.hidden_size:
            raise ProbeError(
                f"{item.kind}: the vector has {vector.width} numbers, but {shape.model.name} "
                f"has a hidden size of {shape.hidden_size}."
            )
