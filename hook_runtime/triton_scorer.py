"""Attention of query rows, summed over the rows, from the shadows: two Triton kernels for all
requests, layers and heads of a step at once, for NVIDIA GPUs.

The first takes the log-sum-exp of every row over parts of its keys, the second, knowing the whole
log-sum-exp, adds up the probabilities of each key over the rows. Keys are read through the block
tables straight from the shadows, and no logits are ever written. Sums run in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from .shadow import LayerShadow, Segment

BLOCK_KEYS = 64
KEYS_PER_PART = 512
OUT_BUDGET = 32_000_000  # float32 elements of one bucket's sums: 128 MB
NONE = 0  # stands for "no window" and "no soft-cap" in the heads' tables


class TritonScorer:
    """Scores segments with the shadows of one worker; all of one head size and dtype."""

    def __init__(self, shadows: Sequence[LayerShadow], device: torch.device) -> None:
        self._device = device
        self._shadows = list(shadows)  # keeps alive what the tables point to
        self._head_dim = shadows[0].geometry.head_dim
        self._dtype = shadows[0].query.dtype
        self._groups = sorted({(s.geometry.group, s.geometry.block_size) for s in shadows})
        pointers, whole, real, sinks = [], [], [], []
        for shadow in shadows:
            g = shadow.geometry
            place = self._groups.index((g.group, g.block_size))
            for row, key_row in enumerate(shadow.key_of_head):
                pointers.append(
                    (shadow.query[0, row].data_ptr(), shadow.key[0, key_row].data_ptr())
                )
                strides = (shadow.query.stride(0), shadow.key.stride(0))
                whole.append((*strides, g.block_size, place, g.window or NONE))
                real.append((g.scale, g.softcap or NONE))
                sinks.append(-torch.inf if shadow.sinks is None else float(shadow.sinks[row]))
        self._heads = len(pointers)
        self._pointers = torch.tensor(pointers, dtype=torch.int64, device=device)
        self._whole = torch.tensor(whole, dtype=torch.int32, device=device)
        self._real = torch.tensor(real, dtype=torch.float32, device=device)
        has_sinks = any(s != -torch.inf for s in sinks)
        self._sinks = torch.tensor(sinks, device=device)[None, :, None] if has_sinks else None

    def warm_up(self) -> None:
        """Compile both kernels' variants now, or the first requests would wait for it."""
        groups = 1 + max(group for group, _ in self._groups)
        for rows in (1, 17):  # fewer than and more than one block of rows
            blank = Segment(0, rows, [[0] * rows for _ in range(groups)], owner=None)
            for _ in self([blank]):
                pass

    @staticmethod
    def suits(shadows: Sequence[LayerShadow], device: torch.device) -> bool:
        """Whether the kernels can take these shadows."""
        kinds = {(s.geometry.head_dim, s.query.dtype) for s in shadows}
        return device.type == "cuda" and len(kinds) == 1 and next(iter(kinds))[0] <= 256

    def __call__(self, segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], torch.Tensor]]:
        """As ``TorchScorer``: buckets, each with float32 [segments, heads, keys]."""
        for bucket in by_length(segments, self._heads, OUT_BUDGET):
            yield bucket, self._sums(bucket)

    def _sums(self, bucket: Sequence[Segment]) -> torch.Tensor:
        count, heads = len(bucket), self._heads
        keys = max(s.stop for s in bucket)
        rows = max(s.stop - s.start for s in bucket)
        bounds, tables = self._move(*_addresses(bucket, self._groups))
        parts = triton.cdiv(keys, KEYS_PER_PART)
        shape = (count, heads, parts, rows)
        partial = torch.full(shape, -torch.inf, dtype=torch.float32, device=self._device)
        sizes = (heads, rows, len(self._groups), tables.shape[2])
        fixed = {
            "HEAD_DIM": self._head_dim,
            "BLOCK_DIM": max(16, triton.next_power_of_2(self._head_dim)),
            "BLOCK_ROWS": 16 if rows <= 16 else 32,
            "BLOCK_KEYS": BLOCK_KEYS,
            "ELEMENT": _ELEMENTS[self._dtype],
        }
        tensors = (self._pointers, self._whole, self._real, bounds, tables)
        rows_over_keys: Any = _rows_over_keys
        rows_over_keys[(count * heads, parts)](
            *tensors, partial, *sizes, parts, PART=KEYS_PER_PART, **fixed
        )
        whole = torch.logsumexp(partial, dim=2)
        if self._sinks is not None:
            whole = torch.logaddexp(whole, self._sinks)
        sums = torch.empty((count, heads, keys), dtype=torch.float32, device=self._device)
        keys_over_rows: Any = _keys_over_rows
        keys_over_rows[(count * heads, triton.cdiv(keys, BLOCK_KEYS))](
            *tensors, whole, sums, *sizes, keys, **fixed
        )
        return sums

    def _move(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        tensors = map(torch.from_numpy, arrays)
        if self._device.type == "cpu":
            return list(tensors)
        return [t.pin_memory().to(self._device, non_blocking=True) for t in tensors]


_ELEMENTS = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


def by_length(segments: Sequence[Segment], heads: int, budget: int) -> Iterator[list[Segment]]:
    """Segments of like length together: padding at most half, sums within the budget."""
    current: list[Segment] = []
    real = 0
    for segment in sorted(segments, key=lambda s: s.stop):
        padded = (len(current) + 1) * segment.stop
        if current and (padded * heads > budget or padded > 1.5 * (real + segment.stop)):
            yield current
            current, real = [], 0
        current.append(segment)
        real += segment.stop
    if current:
        yield current


def _addresses(
    bucket: Sequence[Segment], groups: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """First and end row, int32 [segments, 2]; block tables, int32 [segments, groups, blocks]."""
    bounds = np.array([(s.start, s.stop) for s in bucket], np.int32)
    width = max(-(-s.stop // size) for s in bucket for _, size in groups)
    tables = np.zeros((len(bucket), len(groups), width), np.int32)
    for i, segment in enumerate(bucket):
        for place, (group, size) in enumerate(groups):
            blocks = segment.blocks[group][: -(-segment.stop // size)]
            tables[i, place, : len(blocks)] = blocks
    return bounds, tables


@triton.jit
def _address(place, ELEMENT: tl.constexpr):
    """The address that is stored at ``place``, of elements of that type."""
    return tl.load(place).to(tl.pointer_type(ELEMENT))  # pyright: ignore[reportArgumentType]


@triton.jit
def _load(
    base, stride, table, size, positions, inside, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr
):
    """Vectors [positions, BLOCK_DIM] of the shadow that starts at ``base``."""
    blocks = tl.load(table + positions // size, mask=inside, other=0).to(tl.int64)
    slots = blocks * size + positions % size
    dims = tl.arange(0, BLOCK_DIM)
    mask = inside[:, None] & (dims[None, :] < HEAD_DIM)
    return tl.load(base + slots[:, None] * stride + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _logits(q, k, rows, keys, inside, scale, softcap, window):
    """Scaled, soft-capped and masked logits [rows, keys], float32."""
    x = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0:
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)  # tanh
    visible = inside[None, :] & (keys[None, :] <= rows[:, None])
    visible &= (window == 0) | (keys[None, :] > rows[:, None] - window)
    return tl.where(visible, x, float("-inf"))


@triton.jit(do_not_specialize=["heads", "max_rows", "groups", "table_width", "parts"])
def _rows_over_keys(
    pointers, whole, real, bounds, tables, partial,
    heads, max_rows, groups, table_width, parts,
    PART: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each row over one part of the keys: partial [segments, heads, parts, rows]."""
    pair, part = tl.program_id(0), tl.program_id(1)
    segment, head = pair // heads, pair % heads
    start, stop = tl.load(bounds + segment * 2), tl.load(bounds + segment * 2 + 1)
    first = part * PART
    if first < stop:
        last = tl.minimum(first + PART, stop)
        query = _address(pointers + head * 2, ELEMENT)
        key = _address(pointers + head * 2 + 1, ELEMENT)
        query_stride, key_stride = tl.load(whole + head * 5), tl.load(whole + head * 5 + 1)
        size, place = tl.load(whole + head * 5 + 2), tl.load(whole + head * 5 + 3)
        window = tl.load(whole + head * 5 + 4)
        scale, softcap = tl.load(real + head * 2), tl.load(real + head * 2 + 1)
        table = tables + (segment * groups + place) * table_width
        for low in range(start, stop, BLOCK_ROWS):
            rows = low + tl.arange(0, BLOCK_ROWS)
            real_rows = rows < stop
            q = _load(query, query_stride, table, size, rows, real_rows, HEAD_DIM, BLOCK_DIM)
            top = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_ROWS], tl.float32)
            for key_low in range(first, last, BLOCK_KEYS):
                keys = key_low + tl.arange(0, BLOCK_KEYS)
                inside = keys < last
                k = _load(key, key_stride, table, size, keys, inside, HEAD_DIM, BLOCK_DIM)
                x = _logits(q, k, rows, keys, inside, scale, softcap, window)
                new_top = tl.maximum(top, tl.max(x, axis=1))
                safe = tl.where(new_top == float("-inf"), 0.0, new_top)
                total = total * tl.exp(top - safe) + tl.sum(tl.exp(x - safe[:, None]), axis=1)
                top = new_top
            place_out = (pair * parts + part) * max_rows + rows - start
            tl.store(partial + place_out, top + tl.log(total), mask=real_rows)


@triton.jit(do_not_specialize=["heads", "max_rows", "groups", "table_width", "max_keys"])
def _keys_over_rows(
    pointers, whole, real, bounds, tables, row_sums, sums,
    heads, max_rows, groups, table_width, max_keys,
    HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Probability of each key summed over the rows: sums [segments, heads, keys]."""
    pair, part = tl.program_id(0), tl.program_id(1)
    segment, head = pair // heads, pair % heads
    start, stop = tl.load(bounds + segment * 2), tl.load(bounds + segment * 2 + 1)
    keys = part * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)
    inside = keys < stop
    total = tl.zeros([BLOCK_KEYS], tl.float32)
    if part * BLOCK_KEYS < stop:
        query = _address(pointers + head * 2, ELEMENT)
        key = _address(pointers + head * 2 + 1, ELEMENT)
        query_stride, key_stride = tl.load(whole + head * 5), tl.load(whole + head * 5 + 1)
        size, place = tl.load(whole + head * 5 + 2), tl.load(whole + head * 5 + 3)
        window = tl.load(whole + head * 5 + 4)
        scale, softcap = tl.load(real + head * 2), tl.load(real + head * 2 + 1)
        table = tables + (segment * groups + place) * table_width
        k = _load(key, key_stride, table, size, keys, inside, HEAD_DIM, BLOCK_DIM)
        for low in range(start, stop, BLOCK_ROWS):
            rows = low + tl.arange(0, BLOCK_ROWS)
            real_rows = rows < stop
            q = _load(query, query_stride, table, size, rows, real_rows, HEAD_DIM, BLOCK_DIM)
            x = _logits(q, k, rows, keys, inside, scale, softcap, window)
            known = tl.load(row_sums + pair * max_rows + rows - start, mask=real_rows, other=0.0)
            p = tl.where(real_rows[:, None], tl.exp(x - known[:, None]), 0.0)
            total += tl.sum(p, axis=0)
    tl.store(sums + pair.to(tl.int64) * max_keys + keys, total, mask=keys < max_keys)
