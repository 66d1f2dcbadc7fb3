"""Shadows filled with random queries and keys, and what a scorer must make of them.

Run as a script, prints the largest error of the Triton kernels over every kind; see
tests/unit/test_scorers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hook_runtime.geometry import LayerGeometry
from hook_runtime.shadow import LayerShadow, Segment

BLOCK, BLOCKS, HEADS, KV = 8, 60, 6, 3
LENGTHS = ((50, 41, 47), (23, 20, 23), (64, 3, 40), (150, 148, 150))  # tokens, first row, end row
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS)},
    "window and sinks": {"window": 9, "sinks": torch.linspace(2, -1, HEADS)},
    "second rank": {"first_head": HEADS},
    "odd head size": {"head_dim": 24},
}


def geometry(**how: Any) -> LayerGeometry:
    given = {"window": None, "softcap": None, "sinks": None, "first_head": 0, "head_dim": 16, **how}
    return LayerGeometry(
        layer=0,
        name="layers.0.attn",
        impl=None,
        group=0,
        block_size=BLOCK,
        num_heads=HEADS,
        num_kv_heads=KV,
        scale=0.3,
        **given,
    )


def dense(q: torch.Tensor, k: torch.Tensor, heads: list[int], g: LayerGeometry) -> torch.Tensor:
    """Float64 probabilities [heads, tokens, tokens] of a whole prompt, written out plainly."""
    q, k = q.double(), k.double()
    rows = torch.arange(len(q))
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
            total = total + torch.exp(g.sinks[h].double().cpu())
        out.append(weights / total)
    return torch.stack(out)


def largest_error(
    make_scorer: Callable[[list[LayerShadow], torch.device], Any],
    kind: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> float:
    """Of the scorer's sums over two layers, relative to the largest sum."""
    where = torch.device(device)
    generator = torch.Generator().manual_seed(1)
    given = dict(KINDS[kind])
    if "sinks" in given:
        given["sinks"] = given["sinks"].to(where)
    plain, special = geometry(head_dim=given.get("head_dim", 16)), geometry(**given)
    chosen = {0: ([0, 4], plain), 1: ([1, 2, 5], special)}
    shadows = [
        LayerShadow(g, [h + g.first_head for h in heads], BLOCKS, dtype, where)
        for heads, g in chosen.values()
    ]
    free = torch.randperm(BLOCKS, generator=generator).tolist()
    segments, expected = [], []
    for number, (length, start, stop) in enumerate(LENGTHS):
        blocks = [free.pop() for _ in range(-(-length // BLOCK))]
        segments.append(Segment(start, stop, [blocks], owner=number))
        sums = []
        for shadow, (heads, g) in zip(shadows, chosen.values(), strict=True):
            q = torch.randn(length, HEADS, g.head_dim, generator=generator).to(dtype)
            k = torch.randn(length, KV, g.head_dim, generator=generator).to(dtype)
            _write_in_chunks(shadow, blocks, q, k, where)
            sums.append(dense(q, k, heads, g)[:, start:stop, :stop].sum(1))
        expected.append(torch.cat(sums))
    got = [torch.zeros_like(e) for e in expected]
    for bucket, sums in make_scorer(shadows, where)(segments):
        assert sums.dtype == torch.float32
        for i, segment in enumerate(bucket):
            stop = segments[segment.owner].stop
            values = sums[i].double().cpu()
            assert not values[:, segment.stop :].any(), "keys past the last row were seen"
            got[segment.owner][:, : min(stop, values.shape[1])] += values[:, :stop]
    return max(
        float((g - e).abs().max() / e.abs().max()) for g, e in zip(got, expected, strict=True)
    )


def _write_in_chunks(
    shadow: LayerShadow, blocks: list[int], q: torch.Tensor, k: torch.Tensor, device: torch.device
) -> None:
    """In chunks of 17 tokens, each with a padding token at its end."""
    positions = torch.arange(len(q))
    slots = torch.tensor(blocks)[positions // BLOCK] * BLOCK + positions % BLOCK
    for a in range(0, len(q), 17):
        padded = torch.cat([slots[a : a + 17], torch.tensor([shadow.trash])])
        noise = [torch.full((1, *t.shape[1:]), 9.0, dtype=t.dtype) for t in (q, k)]
        shadow.write(
            padded.to(device),
            torch.cat([q[a : a + 17], noise[0]]).to(device),
            torch.cat([k[a : a + 17], noise[1]]).to(device),
        )


if __name__ == "__main__":
    from hook_runtime.triton_scorer import TritonScorer

    for name in KINDS:
        print(f"{name}\t{largest_error(TritonScorer, name)}")
