"""Copies of the chosen heads' queries and keys, addressed by vLLM's own cache slots.

Mirroring the paged cache slot by slot makes the copy independent of the attention backend's
layout, and makes a prefix-cache hit a hit here too. Queries are kept as well as keys, so that a
prompt that is wholly cached needs no recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .geometry import LayerGeometry
from .memory import slot_bytes


class LayerShadow:
    """Queries [slots, heads, head_dim] and keys [slots, kv heads, head_dim] of one layer.

    Attributes:
        heads: global head numbers, ascending, one per row of ``query``.
        key_of_head: row of ``key`` that each of them reads; int [heads].
        sinks: their extra logits, [heads], or None.
        trash: the slot that padding tokens are written to.
    """

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
        self.key_of_head = [kv.index(h // geometry.heads_per_kv) for h in local]
        slots = num_blocks * geometry.block_size + 1
        self.trash = slots - 1
        size = (slots, len(local), geometry.head_dim)
        self.query = torch.zeros(size, dtype=dtype, device=device)
        self.key = torch.zeros((slots, len(kv), geometry.head_dim), dtype=dtype, device=device)
        self.sinks = None if geometry.sinks is None else geometry.sinks[self._query_index]

    @property
    def nbytes(self) -> int:
        return self.query.nbytes + self.key.nbytes

    @staticmethod
    def size(
        geometry: LayerGeometry, global_heads: Sequence[int], num_blocks: int, dtype: torch.dtype
    ) -> int:
        """What ``nbytes`` would be."""
        local = [h - geometry.first_head for h in global_heads]
        one = slot_bytes(local, geometry.heads_per_kv, geometry.head_dim, dtype.itemsize)
        return one * (num_blocks * geometry.block_size + 1)

    def write(self, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
        """Store a step's tokens; slots int64 [tokens], query and key [tokens, heads, head_dim]."""
        n = min(slots.shape[0], query.shape[0])
        self.key.index_copy_(0, slots[:n], key[:n].index_select(1, self._key_index))
        self.query.index_copy_(0, slots[:n], query[:n].index_select(1, self._query_index))


@dataclass(slots=True, eq=False)
class Segment:
    """Query rows ``start..stop`` of one request, to be scored against every key they see.

    ``blocks`` are the request's cache blocks per KV-cache group.
    """

    start: int
    stop: int
    blocks: list[list[int]]
    owner: object = field(repr=False)
