"""One step of the engine under programs: plans who reads and changes where, and does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from . import compat
from .doors import Doorway
from .errors import ProbeError
from .follower import Piece, RunningProgram, Stretch, rows_of
from .geometry import LayerGeometry
from .interventions import HeadIntervention, StreamIntervention
from .positions import Reach
from .probes import HiddenStateProbe, StateProbe
from .results import Results
from .specs import Head
from .vectors import Vector

logger = logging.getLogger(__name__)


class Share(NamedTuple):
    """Positions start..stop of one request; ``row`` counts them among all of the step's."""

    run: RunningProgram
    start: int
    stop: int
    row: int


@dataclass(slots=True, eq=False)
class Work:
    """One probe or intervention in this step, for all requests with the same program.

    ``number`` is the probe's in its program. ``rows`` are the batch's that the item is about, the
    shares' one after the other; known once the forward has begun.
    """

    item: Any
    number: int
    shares: list[Share]
    rows: torch.Tensor | None = None


class Step:
    """The programs of one engine step.

    A fault fails the step's programs, never the ordinary requests in it: only rows of requests
    with a program are ever written.

    Attributes:
        at_doors: hidden states at which something is to be done, by index.
        at_heads: layers whose heads' outputs are read or changed.
    """

    def __init__(
        self,
        stretches: Iterable[Stretch],
        tokens: int,
        geometry: Mapping[int, LayerGeometry],
        doorway: Doorway | None,
        tensor: Callable[[Vector], torch.Tensor],
    ) -> None:
        """``tokens``: rows of the batch. ``tensor`` gives a vector's values on the device."""
        self._stretches = [s for s in stretches if s.run.failure is None]
        self._tokens = tokens
        self._geometry = geometry
        self._doorway = doorway
        self._tensor = tensor
        self._rows: torch.Tensor | None = None
        self._error: Exception | None = None
        self._seen: set[tuple[str, int]] = set()
        self._works: list[Work] = []
        self.at_doors: dict[int, list[Work]] = {}
        self.at_heads: dict[int, list[Work]] = {}
        self._plan()

    @property
    def busy(self) -> bool:
        """Whether there is anything to do during the forward."""
        return bool(self.at_doors or self.at_heads)

    # ------------------------------------------------------------ the plan

    def _plan(self) -> None:
        """Interventions come before probes at every place, each in the program's order."""
        groups: dict[str, list[tuple[Stretch, int]]] = {}
        row = 0
        for stretch in self._stretches:
            groups.setdefault(stretch.run.key, []).append((stretch, row))
            row += stretch.stop - stretch.start
        for group in groups.values():
            program = group[0][0].run.program
            for item in program.interventions:
                shares = [_share(s, row, item.reach(s.run.prompt_len), 0) for s, row in group]
                self._put(Work(item, -1, [s for s in shares if s is not None]))
            for number, probe in enumerate(program.probes):
                self._put(Work(probe, number, list(_to_read(group, number, probe))))

    def _put(self, work: Work) -> None:
        if not work.shares:
            return
        self._works.append(work)
        item = work.item
        if isinstance(item, StreamIntervention | HiddenStateProbe):
            if self._doorway is None:
                return
            shift = 1 if isinstance(item, StreamIntervention) else 0
            here = self._doorway.indices
            if isinstance(item, HiddenStateProbe) and compat.tensor_parallel_rank() > 0:
                return  # every rank has the same stream: the first one's will do
            for layer in item.layers:
                assert isinstance(layer, int)
                if layer + shift in here:
                    self.at_doors.setdefault(layer + shift, []).append(work)
        else:
            for layer in sorted({h.layer for h in item.heads}):
                if layer in self._geometry and self._local(item.heads, self._geometry[layer]):
                    self.at_heads.setdefault(layer, []).append(work)

    @staticmethod
    def _local(heads: Sequence[Head], geometry: LayerGeometry) -> list[Head]:
        return [h for h in heads if h.layer == geometry.layer and geometry.has(h.head)]

    # ------------------------------------------------------------ during the forward

    def at_door(self, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """A hidden state passes, as a pair that adds up to it, or whole."""
        works = self.at_doors.get(index)
        if works is None or self._error is not None:
            return
        try:
            self._seen.add(("door", index))
            for work in works:
                rows = self._rows_of(work)
                states = hidden[rows] if residual is None else hidden[rows] + residual[rows]
                if isinstance(work.item, StreamIntervention):
                    changed = work.item.change(states.float(), index - 1, self._tensor)
                    _write(rows, changed.to(states.dtype), hidden, residual)
                else:
                    self._read(work, index, self._normed(index, states))
        except Exception as error:
            self._error = error

    def _normed(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """The last of the hidden states is what the final norm makes of the stream."""
        doorway = self._doorway
        assert doorway is not None
        if doorway.norm is None or index != doorway.last:
            return states
        return doorway.norm(states)

    def at_attention(self, geometry: LayerGeometry, output: torch.Tensor) -> None:
        """One layer's attention is computed: ``output`` [tokens, heads * head_dim], in place."""
        if self._error is not None:
            return
        try:
            self._seen.add(("heads", geometry.layer))
            if not output.is_floating_point() or output.element_size() < 2:
                raise ProbeError(f"attention gives out {output.dtype}: heads cannot be told apart")
            heads = output.view(output.shape[0], geometry.num_heads, -1)
            for work in self.at_heads[geometry.layer]:
                rows = self._rows_of(work)
                for head in self._local(work.item.heads, geometry):
                    local = head.head - geometry.first_head
                    states = heads[rows, local]
                    if isinstance(work.item, HeadIntervention):
                        changed = work.item.change(states.float(), head, self._tensor)
                        heads[rows, local] = changed.to(states.dtype)
                    else:
                        self._read(work, head, states)
        except Exception as error:
            self._error = error

    def _rows_of(self, work: Work) -> torch.Tensor:
        if work.rows is None:
            if self._rows is None:
                self._rows = self._locate()
            places = [np.arange(s.row, s.row + s.stop - s.start) for s in work.shares]
            index = torch.from_numpy(np.concatenate(places)).to(self._rows.device)
            work.rows = self._rows[index]
        return work.rows

    def _locate(self) -> torch.Tensor:
        """Batch rows of all stretches, one after the other."""
        layers = self._geometry.values()
        full = next((g for g in layers if g.window is None), None) or next(iter(layers))
        mapping = compat.slot_mapping(full.name)[: self._tokens]
        slots = [s.slots(full.group, full.block_size) for s in self._stretches]
        return rows_of(np.concatenate(slots), mapping)

    def _read(self, work: Work, key: int | Head, states: torch.Tensor) -> None:
        kept = work.item.observe(states)
        offsets, end = [], 0
        for share in work.shares:
            offsets.append(end)
            end += share.stop - share.start
        if len(kept) != end:
            raise ProbeError(f"{work.item.kind} kept {len(kept)} rows of {end}: keep all.")
        if work.item.reduce == "mean":
            spans = zip(offsets, [*offsets[1:], end], strict=True)
            kept = torch.stack([kept[a:b].float().sum(dim=0) for a, b in spans])
            offsets = list(range(len(work.shares)))
        part = Results.fetch(kept)
        for share, offset in zip(work.shares, offsets, strict=True):
            pieces = share.run.pieces.setdefault((work.number, key), [])
            pieces.append(Piece(share.start, share.stop, part, offset))

    # ------------------------------------------------------------ after it

    def end(self) -> None:
        """The step is done: what was carried out, and what was not."""
        expected = {("door", i) for i in self.at_doors} | {("heads", i) for i in self.at_heads}
        missed = sorted(expected - self._seen)
        if self._error is not None:
            logger.error("the programs of this step failed", exc_info=self._error)
            reason = f"{type(self._error).__name__}: {self._error}"
        elif missed:
            reason = f"{len(missed)} places of the model were not seen, the first {missed[0]}"
        else:
            for stretch in self._stretches:
                stretch.run.done = max(stretch.run.done, stretch.stop)
            for work in self._works:
                for share in work.shares:
                    if isinstance(work.item, StateProbe):
                        share.run.read_until[work.number] = share.stop
            return
        for stretch in self._stretches:
            stretch.run.fail(reason)


def _share(stretch: Stretch, row: int, reach: Reach | None, low: int) -> Share | None:
    """What of the stretch an item with this reach is about, from position ``low`` on."""
    if reach is None:
        return None
    start = max(stretch.start, reach[0], low)
    stop = stretch.stop if reach[1] is None else min(stretch.stop, reach[1])
    if start >= stop:
        return None
    return Share(stretch.run, start, stop, row + start - stretch.start)


def _to_read(group: list[tuple[Stretch, int]], number: int, probe: StateProbe) -> Iterable[Share]:
    for stretch, row in group:
        run = stretch.run
        reach = probe.reach(run.prompt_len)
        if reach is not None and reach[0] < run.first and run.failure is None:
            run.fail(f"tokens before {run.first} came from the prefix cache and were not read")
        share = _share(stretch, row, reach, run.read_until.get(number, 0))
        if share is not None and run.failure is None:
            yield share


def _write(
    rows: torch.Tensor, states: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
) -> None:
    """Make these rows of the stream ``states``: the whole of it in one of the pair."""
    if residual is None:
        hidden.index_copy_(0, rows, states)
    else:
        residual.index_copy_(0, rows, states)
        hidden.index_fill_(0, rows, 0)
