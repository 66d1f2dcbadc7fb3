"""Attention of query rows, summed over the rows, from the shadows: in plain torch, for any device.

Segments of like length are padded to one batch, whose logits are held one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .attention import probabilities
from .shadow import LayerShadow, Segment

# Elements of one layer's logits or gathered keys in one bucket, whichever are more: with their
# copies about 100 MB on a CPU, 400 MB on a GPU, where more small kernels would cost more.
BUDGET = {"cpu": 16_000_000, "cuda": 64_000_000}


class TorchScorer:
    """Scores segments with the shadows of one worker."""

    def __init__(self, shadows: Sequence[LayerShadow], device: torch.device) -> None:
        self._shadows = list(shadows)
        self._device = device
        self._widest = max(len(s.heads) for s in shadows)
        self._head_dim = max(s.geometry.head_dim for s in shadows)
        self._key_of_head = [torch.tensor(s.key_of_head, device=device) for s in shadows]

    def __call__(self, segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], torch.Tensor]]:
        """Buckets of the segments, each with its sums: float32 [segments, heads, keys].

        Heads are in the shadows' order; keys are prompt positions from 0 to the last row of the
        longest segment. A segment may come in several buckets, rows apart.
        """
        budget = BUDGET.get(self._device.type, BUDGET["cpu"])
        for bucket in buckets(segments, self._widest, self._head_dim, budget):
            indices: dict[tuple[int, int | None], PageIndex] = {}
            parts = []
            for shadow, key_of_head in zip(self._shadows, self._key_of_head, strict=True):
                g = shadow.geometry
                kind = (g.group, g.window)
                if kind not in indices:
                    indices[kind] = page_index(
                        bucket, g.group, g.block_size, g.window, shadow.trash, self._device
                    )
                parts.append(row_sums(shadow, key_of_head, indices[kind]))
            yield bucket, torch.cat(parts, dim=1)


@dataclass(slots=True, eq=False)
class PageIndex:
    """Where a bucket's rows and keys lie in the shadow of one KV-cache group.

    Shapes: rows [batch, rows], keys [batch, keys]. ``row_weight`` is 0 for padding; ``width`` is
    the number of prompt positions up to the bucket's last row.
    """

    row_slots: torch.Tensor
    row_position: torch.Tensor
    row_weight: torch.Tensor
    key_slots: torch.Tensor
    key_position: torch.Tensor
    width: int


def row_sums(shadow: LayerShadow, key_of_head: torch.Tensor, index: PageIndex) -> torch.Tensor:
    """Attention of the indexed rows, summed over rows; float32 [batch, heads, positions]."""
    g = shadow.geometry
    p = probabilities(
        shadow.query[index.row_slots],
        shadow.key[index.key_slots].index_select(2, key_of_head),
        index.row_position,
        index.key_position,
        scale=g.scale,
        window=g.window,
        softcap=g.softcap,
        sinks=shadow.sinks,
    )
    sums = torch.matmul(index.row_weight[:, None, None, :], p)[:, :, 0, :]
    if g.window is None:  # then keys start at position 0
        return sums
    places = index.key_position.clamp(min=0)[:, None, :].expand(-1, sums.shape[1], -1)
    return sums.new_zeros((*sums.shape[:2], index.width)).scatter_add_(2, places, sums)


def page_index(
    segments: Sequence[Segment],
    group: int,
    block_size: int,
    window: int | None,
    trash: int,
    device: torch.device,
) -> PageIndex:
    """Index tensors of a bucket for the layers of one group, padded to the longest segment."""
    lows = [max(0, s.start - window + 1) if window else 0 for s in segments]
    batch = len(segments)
    rows = max(s.stop - s.start for s in segments)
    keys = max(s.stop - low for s, low in zip(segments, lows, strict=True))
    row_slots = np.full((batch, rows), trash, np.int64)
    row_position = np.zeros((batch, rows), np.int64)
    row_weight = np.zeros((batch, rows), np.float32)
    key_slots = np.full((batch, keys), trash, np.int64)
    key_position = np.full((batch, keys), -1, np.int64)
    for i, (segment, low) in enumerate(zip(segments, lows, strict=True)):
        positions = np.arange(low, segment.stop)
        blocks = np.asarray(segment.blocks[group], np.int64)
        slots = blocks[positions // block_size] * block_size + positions % block_size
        key_slots[i, : len(slots)] = slots
        key_position[i, : len(slots)] = positions
        n = segment.stop - segment.start
        row_slots[i, :n] = slots[-n:]
        row_position[i, :n] = positions[-n:]
        row_position[i, n:] = positions[-1]  # a padded row must see a key, or its softmax is NaN
        row_weight[i, :n] = 1.0

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    arrays = (row_slots, row_position, row_weight, key_slots, key_position)
    return PageIndex(*map(move, arrays), width=max(s.stop for s in segments))


def split_rows(segment: Segment, max_rows: int) -> list[Segment]:
    """Cut a segment into pieces of at most ``max_rows`` rows."""
    return [
        Segment(a, min(a + max_rows, segment.stop), segment.blocks, segment.owner)
        for a in range(segment.start, segment.stop, max_rows)
    ]


def buckets(
    segments: Sequence[Segment], heads: int, head_dim: int, budget: int
) -> list[list[Segment]]:
    """Group segments of like length so that padding stays small and a bucket fits the budget.

    ``heads`` is the most heads any layer has in the shadow. ``budget`` bounds, in elements, both
    the logits [batch, heads, rows, keys] of one layer and the keys gathered for them
    [batch, keys, heads, head_dim], which are held about twice; a single segment may exceed it by
    its keys.
    """
    pieces: list[Segment] = []
    for segment in segments:
        pieces.extend(split_rows(segment, max(1, budget // (heads * segment.stop))))
    pieces.sort(key=lambda s: (s.stop, s.stop - s.start))
    result: list[list[Segment]] = []
    current: list[Segment] = []
    rows = real = 0
    for piece in pieces:
        n, k = piece.stop - piece.start, piece.stop
        padded = (len(current) + 1) * max(rows, n) * k
        gathered = (len(current) + 1) * 2 * head_dim * k
        if current and (max(padded, gathered) * heads > budget or padded > 1.5 * (real + n * k)):
            result.append(current)
            current, rows, real = [], 0, 0
        current.append(piece)
        rows, real = max(rows, n), real + n * k
    if current:
        result.append(current)
    return result
