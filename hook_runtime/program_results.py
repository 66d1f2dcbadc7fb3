"""What programs read in the worker, until the engine's side takes it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from .follower import Piece, RunningProgram
from .specs import Head

MAX_RESULTS = 100_000


class ProgramResults:
    """Runs and refusals by run id; the oldest go when nobody takes them."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, RunningProgram | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def follow(self, run: RunningProgram) -> None:
        """The run is in the engine. Once only: what was discarded does not come back."""
        if not run.announced:
            run.announced = True
            self._store(run.run_id, run)

    def refuse(self, run_id: str, reason: str) -> None:
        """The request runs without its program, which cannot be read."""
        self._store(run_id, reason)

    def discard(self, run_ids: Sequence[str]) -> None:
        """Drop results nobody will take."""
        for run_id in run_ids:
            self._results.pop(run_id, None)

    def take(self, asked: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
        """Results of ``(run id, end)``, in this order; each is handed out once.

        ``end`` is the first position that the request did not need; what an engine that runs
        ahead computed there is left out. ``{"done": position, "read": [...]}`` with one entry a
        probe that read anything here, or ``{"error": reason}``, or ``{}`` for an unknown id.
        """
        return [_plain(self._results.pop(run_id, None), end) for run_id, end in asked]

    def _store(self, run_id: str, result: RunningProgram | str) -> None:
        self._results[run_id] = result
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)


def _plain(result: RunningProgram | str | None, end: int) -> dict[str, Any]:
    if result is None:
        return {}
    if isinstance(result, str):
        return {"error": result}
    if result.failure is not None:
        return {"error": result.failure}
    read = [_probe(result, number, end) for number in sorted({n for n, _ in result.pieces})]
    result.pieces = {}
    return {"done": result.done, "read": [r for r in read if r is not None]}


def _probe(run: RunningProgram, number: int, end: int) -> dict[str, Any] | None:
    """One probe's rows: values [layers or heads, rows, width] in the model's type."""
    mean = run.program.probes[number].reduce == "mean"
    keys, tensors = [], []
    pieces: list[Piece] = []
    for (probe, key), found in run.pieces.items():
        if probe != number:
            continue
        pieces = [p for p in found if p.start < end]
        if pieces:
            keys.append(key)
            tensors.append(_mean(pieces) if mean else _rows(pieces, end))
    if not keys:
        return None
    values = torch.stack(tensors).contiguous()
    return {
        "probe": number,
        "keys": [list(k) if isinstance(k, Head) else k for k in keys],
        "positions": [pieces[0].start, min(end, pieces[-1].stop)],
        "shape": list(values.shape),
        "dtype": str(values.dtype).removeprefix("torch."),
        "data": values.view(torch.uint8).numpy().tobytes(),
    }


def _arrived(piece: Piece) -> torch.Tensor:
    if piece.part.arrived is not None:
        piece.part.arrived.synchronize()
    return piece.part.values


def _rows(pieces: Sequence[Piece], end: int) -> torch.Tensor:
    found = []
    for piece in pieces:
        count = min(piece.stop, end) - piece.start
        found.append(_arrived(piece)[piece.offset : piece.offset + count])
    return torch.cat(found)


def _mean(pieces: Sequence[Piece]) -> torch.Tensor:
    """One row; what runs ahead is a step of its own, so no sum goes past the end."""
    total = torch.stack([_arrived(p)[p.offset] for p in pieces]).double().sum(dim=0)
    count = sum(p.stop - p.start for p in pieces)
    return (total / count).float()[None]
