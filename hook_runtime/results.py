"""Finished captures in the worker, until the engine's side takes them."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .specs import Head, reduce_values
from .tracker import ProbedRequest
from .whole import WholePrompt

MAX_RESULTS = 100_000


class Part(NamedTuple):
    """Sums of one bucket on their way to the host; ``arrived`` is None where they are there.

    ``values``: float32 [segments, heads held, keys]; [segments, 1, keys] where ``added``, that is
    where all of them want all heads added up: so much less is brought to the host.
    """

    values: torch.Tensor
    arrived: torch.cuda.Event | None
    added: bool = False


class Results:
    """What was captured or went wrong, by capture id; the oldest go when nobody takes them."""

    def __init__(self) -> None:
        self._results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._unreduced: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._results)

    def reject(self, capture_id: str, reason: str) -> None:
        """The request's probe could not be read: trying again is no use."""
        self._store(capture_id, {"error": reason})

    def fail(self, capture_id: str, reason: str, stale: bool = False) -> None:
        """The capture is incomplete: worth another try.

        Unless it was complete before: a request preempted while it generated comes again.
        """
        if self._results.get(capture_id, {}).keys() & {"request", "values"}:
            return
        self._store(capture_id, {"incomplete": reason, "stale": stale})

    def finish(self, request: ProbedRequest, held: Sequence[Head]) -> None:
        """The request's prompt is computed. ``held`` are the heads along the sums' second axis."""
        if request.failure is not None:
            self.fail(request.capture_id, request.failure, request.stale)
        else:
            self._store(request.capture_id, {"request": request, "held": held})
            if request.probe.heads != "all":
                self._unreduced.append(request.capture_id)

    def settle(self) -> None:
        """Reduce what has arrived on the host: sums over all heads held and all keys are large."""
        while self._unreduced:
            capture_id = self._unreduced[0]
            result = self._results.get(capture_id)
            if result is not None and "request" in result:
                if not _has_arrived(result["request"]):
                    return
                self._results[capture_id] = _plain(result)
            self._unreduced.popleft()

    @staticmethod
    def fetch_sums(
        sums: torch.Tensor, owners: Sequence[ProbedRequest], held: Sequence[Head]
    ) -> Part:
        """``fetch`` of a bucket's sums, added up over the heads first where that is all they want.

        ``owners`` are the requests along the sums' first axis, ``held`` the heads along the second.
        """
        added = all(o.probe.sum_heads and set(held) <= set(o.probe.heads) for o in owners)
        if added:
            sums = sums.sum(dim=1, keepdim=True, dtype=torch.float64).float()  # as _selected does
        return Results.fetch(sums)._replace(added=added)

    @staticmethod
    def fetch(values: torch.Tensor) -> Part:
        """Start the copy of what was computed to the host, without waiting for it."""
        if values.device.type == "cpu":
            return Part(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Part(host, arrived)

    def take(self, capture_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Results in the order asked for, as plain values; each is handed out once.

        ``{"heads": [[layer, head], ...], "values": float32 bytes [heads or 1, columns]}``; or
        ``{"incomplete": reason, "stale": bool}``, worth another try; or ``{"error": reason}``,
        not worth one; or ``{}`` for an unknown id.
        """
        return [_plain(self._results.pop(i, None)) for i in capture_ids]

    def discard(self, capture_ids: Sequence[str]) -> None:
        """Drop results nobody will take."""
        for capture_id in capture_ids:
            self._results.pop(capture_id, None)

    def _store(self, capture_id: str, result: dict[str, Any]) -> None:
        self._results[capture_id] = result
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)


def _has_arrived(request: ProbedRequest) -> bool:
    """Whether the sums are on the host."""
    return all(part.arrived is None or part.arrived.query() for part, _ in request.parts)


def _plain(result: dict[str, Any] | None) -> dict[str, Any]:
    if result is None or "request" not in result:
        return result or {}
    request: ProbedRequest = result["request"]
    if request.probe.heads == "all":
        heads, sums = WholePrompt.merge(request.parts)
    else:
        heads, sums = _selected(request, result["held"])
    values = reduce_values(sums / request.rows_done, request.probe)
    return {"heads": [list(h) for h in heads], "values": values.tobytes()}


def _selected(request: ProbedRequest, held: Sequence[Head]) -> tuple[list[Head], np.ndarray]:
    """The probe's heads out of those held; its columns out of the sums over all keys.

    Float32 [heads, columns], or [1, columns] where the probe wants the heads added up.
    """
    wanted = set(request.probe.heads)
    rows = [i for i, head in enumerate(held) if head in wanted]
    together = request.probe.sum_heads
    sums = np.zeros((1 if together else len(rows), len(request.columns)), np.float32)
    for part, i in request.parts:
        if part.arrived is not None:
            part.arrived.synchronize()
        values = part.values[i].numpy()
        seen = int(np.searchsorted(request.columns, values.shape[1]))
        found = (values if part.added else values[rows])[:, request.columns[:seen]]
        sums[:, :seen] += found.sum(axis=0, keepdims=True, dtype=np.float64) if together else found
    return [held[i] for i in rows], sums
