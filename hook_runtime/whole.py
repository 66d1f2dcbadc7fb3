"""Every head of every layer for a prompt that is prefilled in one chunk, one layer at a time.

A shadow of every head would outgrow the KV cache, so the attention is taken from each layer's own
q and k as they pass, and only the reduced columns stay.
"""

from __future__ import annotations

import numpy as np
import torch

from .attention import probabilities
from .geometry import LayerGeometry
from .specs import Head
from .tracker import Chunk

LOGIT_BUDGET = 16_000_000  # float32 elements of one layer's logits held at a time: 64 MB


class WholePrompt:
    """Collects one request's attention during the step that computes its whole prompt."""

    def __init__(self, chunk: Chunk) -> None:
        self.request = chunk.request
        self._offset: dict[int, int] = {}
        self._sums: dict[int, tuple[LayerGeometry, torch.Tensor]] = {}
        if chunk.start != 0 or chunk.stop != chunk.request.prompt_len:
            chunk.request.fail(
                f"a probe of all heads needs its {chunk.request.prompt_len}-token prompt in one "
                f"prefill chunk, but got tokens {chunk.start} to {chunk.stop}"
            )

    def see(
        self, geometry: LayerGeometry, slots: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> None:
        """One layer's q [tokens, heads, head_dim] and k of the whole step."""
        if self.request.failure is not None:
            return
        offset = self._offset.get(geometry.group)
        if offset is None:
            offset = self._locate(geometry, slots)
            if offset is None:
                self.request.fail("the prompt's tokens were not found in the step's batch")
                return
            self._offset[geometry.group] = offset
        sums = self._sum_rows(geometry, offset, query, key)
        if self.request.probe.sum_heads:
            sums = sums.sum(dim=0, keepdim=True)
        self._sums[geometry.layer] = (geometry, sums)

    def _locate(self, geometry: LayerGeometry, slots: torch.Tensor) -> int | None:
        """Row of the prompt's first token: where the slot of its first token lies in the batch."""
        positions = np.arange(self.request.prompt_len)
        blocks = np.asarray(self.request.blocks[geometry.group], np.int64)
        size = geometry.block_size
        expected = torch.from_numpy(blocks[positions // size] * size + positions % size)
        expected = expected.to(slots.device)
        found = (slots == expected[-1]).nonzero()
        if len(found) != 1:
            return None
        start = int(found[0, 0]) - len(positions) + 1
        inside = start >= 0 and bool((slots[start : start + len(positions)] == expected).all())
        return start if inside else None

    def _sum_rows(
        self, geometry: LayerGeometry, offset: int, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        q0, q1 = self.request.probe.query_span
        device = query.device
        keys = key[offset : offset + q1].repeat_interleave(geometry.heads_per_kv, dim=1)[None]
        key_position = torch.arange(q1, device=device)[None]
        step = max(1, LOGIT_BUDGET // (geometry.num_heads * q1))
        total = torch.zeros(geometry.num_heads, q1, device=device)
        for start in range(q0, q1, step):
            stop = min(start + step, q1)
            p = probabilities(
                query[offset + start : offset + stop][None],
                keys,
                torch.arange(start, stop, device=device)[None],
                key_position,
                scale=geometry.scale,
                window=geometry.window,
                softcap=geometry.softcap,
                sinks=geometry.sinks,
            )
            total += p[0].sum(dim=1)
        columns = torch.from_numpy(self.request.columns).to(device)
        seen = columns < q1  # what comes after the query is seen by no row
        return total[:, torch.where(seen, columns, 0)] * seen

    def finish(self) -> None:
        """Hand the sums to the request once every layer has been seen."""
        if self.request.failure is None:
            q0, q1 = self.request.probe.query_span
            self.request.rows_done = q1 - q0
            self.request.parts = [self._sums[layer] for layer in sorted(self._sums)]

    @staticmethod
    def merge(parts: list[tuple[LayerGeometry, torch.Tensor]]) -> tuple[list[Head], np.ndarray]:
        """Heads in layer order, and their sums; float32 [heads or layers, columns]."""
        heads = [Head(g.layer, g.first_head + h) for g, _ in parts for h in range(g.num_heads)]
        return heads, torch.cat([sums for _, sums in parts]).cpu().numpy()
