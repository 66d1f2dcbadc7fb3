"""Copies of the chosen heads' queries and keys, addressed by vLLM's own cache slots.

Mirroring the paged cache slot by slot makes the copy independent of the attention backend's
layout, and makes a prefix-cache hit a hit here too. Queries are kept as well as keys, so that a
prompt that is wholly cached needs no recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from .attention import probabilities
from .geometry import LayerGeometry


class LayerShadow:
    """Queries [slots, heads, head_dim] and keys [slots, kv heads, head_dim] of one layer."""

    def __init__(
        self,
        geometry: LayerGeometry,
        global_heads: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.heads = sorted(global_heads)
        local = [h - geometry.first_head for h in self.heads]
        kv = sorted({h // geometry.heads_per_kv for h in local})
        self._query_index = torch.tensor(local, device=device)
        self._key_index = torch.tensor(kv, device=device)
        self._key_of_head = torch.tensor(
            [kv.index(h // geometry.heads_per_kv) for h in local], device=device
        )
        slots = num_blocks * geometry.block_size + 1
        self.trash = slots - 1  # padding tokens (slot -1) are written here
        size = (slots, len(local), geometry.head_dim)
        self._query = torch.zeros(size, dtype=dtype, device=device)
        self._key = torch.zeros((slots, len(kv), geometry.head_dim), dtype=dtype, device=device)
        sinks = geometry.sinks
        self._sinks = None if sinks is None else sinks[self._query_index]

    @property
    def nbytes(self) -> int:
        return self._query.nbytes + self._key.nbytes

    def write(self, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Store a step's tokens; slots int64 [tokens], query and key [tokens, heads, head_dim]."""
        n = min(slots.shape[0], query.shape[0])
        self._key.index_copy_(0, slots[:n], key[:n].index_select(1, self._key_index))
        self._query.index_copy_(0, slots[:n], query[:n].index_select(1, self._query_index))

    def row_sums(self, index: PageIndex) -> torch.Tensor:
        """Attention of the indexed rows, summed over rows; float32 [batch, heads, columns]."""
        g = self.geometry
        p = probabilities(
            self._query[index.row_slots],
            self._key[index.key_slots].index_select(2, self._key_of_head),
            index.row_position,
            index.key_position,
            scale=g.scale,
            window=g.window,
            softcap=g.softcap,
            sinks=self._sinks,
        )
        sums = torch.matmul(index.row_weight[:, None, None, :], p)[:, :, 0, :]
        columns = index.column[:, None, :].expand(-1, sums.shape[1], -1)
        return sums.gather(2, columns) * index.column_weight[:, None, :]


@dataclass(slots=True, eq=False)
class Segment:
    """Query rows ``start..stop`` of one request, to be scored against every key they see.

    ``blocks`` are the request's cache blocks per KV-cache group; ``columns`` the prompt positions
    whose attention is wanted, int64 [columns].
    """

    start: int
    stop: int
    blocks: list[list[int]]
    columns: np.ndarray
    owner: object = field(repr=False)


@dataclass(slots=True, eq=False)
class PageIndex:
    """Where a bucket's rows, keys and columns lie in the shadow of one KV-cache group.

    Shapes: rows [batch, rows], keys [batch, keys], columns [batch, columns]. ``column`` indexes the
    keys; the weights are 0 for padding.
    """

    row_slots: torch.Tensor
    row_position: torch.Tensor
    row_weight: torch.Tensor
    key_slots: torch.Tensor
    key_position: torch.Tensor
    column: torch.Tensor
    column_weight: torch.Tensor


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
    columns = max(len(s.columns) for s in segments)
    row_slots = np.full((batch, rows), trash, np.int64)
    row_position = np.zeros((batch, rows), np.int64)
    row_weight = np.zeros((batch, rows), np.float32)
    key_slots = np.full((batch, keys), trash, np.int64)
    key_position = np.full((batch, keys), -1, np.int64)
    column = np.zeros((batch, columns), np.int64)
    column_weight = np.zeros((batch, columns), np.float32)
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
        seen = (segment.columns >= low) & (segment.columns < segment.stop)
        m = len(segment.columns)
        column[i, :m] = np.where(seen, segment.columns - low, 0)
        column_weight[i, :m] = seen

    def move(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

    return PageIndex(
        *map(
            move,
            (
                row_slots,
                row_position,
                row_weight,
                key_slots,
                key_position,
                column,
                column_weight,
            ),
        )
    )


def split_rows(segment: Segment, max_rows: int) -> list[Segment]:
    """Cut a segment into pieces of at most ``max_rows`` rows."""
    return [
        Segment(a, min(a + max_rows, segment.stop), segment.blocks, segment.columns, segment.owner)
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
