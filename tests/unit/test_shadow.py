"""The shadow's paged scoring against a dense softmax over the same queries and keys."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from hook_runtime.geometry import LayerGeometry
from hook_runtime.shadow import LayerShadow, Segment, buckets, page_index

BLOCK, BLOCKS, DIM, HEADS, KV = 8, 40, 16, 6, 3


def geometry(**how: object) -> LayerGeometry:
    given = {"window": None, "softcap": None, "sinks": None, "first_head": 0, **how}
    return LayerGeometry(
        layer=0,
        name="layers.0.attn",
        impl=None,
        group=0,
        block_size=BLOCK,
        num_heads=HEADS,
        num_kv_heads=KV,
        head_dim=DIM,
        scale=0.3,
        **given,  # type: ignore[arg-type]
    )


def dense(q: torch.Tensor, k: torch.Tensor, heads: list[int], g: LayerGeometry) -> torch.Tensor:
    """Float64 probabilities [heads, tokens, tokens] of a whole prompt, written out plainly."""
    q, k = q.double(), k.double()
    n = len(q)
    rows = torch.arange(n)
    hidden = rows[None, :] > rows[:, None]
    if g.window:
        hidden |= rows[None, :] <= rows[:, None] - g.window
    out = []
    for h in heads:
        logits = q[:, h] @ k[:, h // (HEADS // KV)].T * g.scale
        if g.softcap:
            logits = g.softcap * torch.tanh(logits / g.softcap)
        weights = torch.exp(logits.masked_fill(hidden, float("-inf")))
        total = weights.sum(-1, keepdim=True)
        if g.sinks is not None:
            total = total + torch.exp(g.sinks[h].double())
        out.append(weights / total)
    return torch.stack(out)


KINDS = {
    "full": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "window and sinks": {"window": 9, "sinks": torch.linspace(2, -1, HEADS)},
    "second rank": {"first_head": HEADS},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [16_000_000, 700])
def test_row_sums_equal_a_dense_softmax(kind: str, budget: int) -> None:
    generator = torch.Generator().manual_seed(1)
    g = geometry(**KINDS[kind])
    heads = [1, 2, 5]
    shadow = LayerShadow(
        g, [h + g.first_head for h in heads], BLOCKS, torch.float32, torch.device("cpu")
    )
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    segments, expected = [], {}
    for number, (length, start, stop) in enumerate([(50, 41, 47), (23, 20, 23), (64, 3, 40)]):
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        q = torch.randn(length, HEADS, DIM, generator=generator)
        k = torch.randn(length, KV, DIM, generator=generator)
        positions = torch.arange(length)
        slots = torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
        for a in range(0, length, 17):  # written in chunks, with padding at the end
            padded = torch.cat([slots[a : a + 17], torch.tensor([shadow.trash])])
            shadow.write(
                padded,
                torch.cat([q[a : a + 17], torch.full((1, HEADS, DIM), 9.0)]),
                torch.cat([k[a : a + 17], torch.full((1, KV, DIM), 9.0)]),
            )
        columns = np.array([0, 4, 5, 11, min(30, length - 1)], np.int64)
        segments.append(Segment(start, stop, [blocks], columns, owner=number))
        probabilities = dense(q, k, heads, g)[:, start:stop].sum(1)
        expected[number] = probabilities[:, torch.from_numpy(columns)]
    got: dict[int, torch.Tensor] = {}
    for bucket in buckets(segments, len(heads), DIM, budget):
        index = page_index(bucket, 0, BLOCK, g.window, shadow.trash, torch.device("cpu"))
        for segment, sums in zip(bucket, shadow.row_sums(index), strict=True):
            assert isinstance(segment.owner, int)
            part = sums[:, : len(segment.columns)]
            got[segment.owner] = got.get(segment.owner, torch.zeros(())) + part
    for number, want in expected.items():
        torch.testing.assert_close(got[number].double(), want, rtol=0, atol=2e-6 * want.max())


def test_buckets_keep_every_row_once_and_respect_the_budget() -> None:
    columns = np.arange(3)
    segments = [
        Segment(stop - rows, stop, [[0]], columns, owner=i)
        for i, (rows, stop) in enumerate([(5, 100), (40, 4000), (5, 110), (1, 8), (300, 900)])
    ]
    heads, head_dim, budget = 4, 16, 200_000
    rows_of: dict[int, list[int]] = {}
    for bucket in buckets(segments, heads, head_dim, budget):
        widest = max(s.stop - s.start for s in bucket)
        keys = len(bucket) * heads * max(s.stop for s in bucket)
        assert keys * widest <= budget
        assert len(bucket) == 1 or keys * 2 * head_dim <= budget
        for piece in bucket:
            assert isinstance(piece.owner, int)
            rows_of.setdefault(piece.owner, []).extend(range(piece.start, piece.stop))
    for i, segment in enumerate(segments):
        assert sorted(rows_of[i]) == list(range(segment.start, segment.stop))
