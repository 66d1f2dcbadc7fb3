"""Attention probabilities from queries and keys, as the model itself computes them; pure torch."""

from __future__ import annotations

import torch


def probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    row_position: torch.Tensor,
    key_position: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal softmax in float32 over the keys each row sees.

    Args:
        query: [batch, rows, heads, head_dim], any float dtype.
        key: [batch, keys, heads, head_dim], already repeated to one per query head.
        row_position: int [batch, rows], positions in the prompt.
        key_position: int [batch, keys], positions in the prompt; a negative one is padding, which
            no row sees.
        scale: factor on the dot products.
        window: rows see only the ``window`` keys up to and including their own position.
        softcap: ``softcap * tanh(logits / softcap)`` before the mask (Gemma 2).
        sinks: [heads], an extra logit that takes probability but is no key (gpt-oss).

    Returns:
        float32 [batch, heads, rows, keys]; rows of padding hold no meaning.
    """
    q = query.float().transpose(1, 2)
    k = key.float().permute(0, 2, 3, 1)
    logits = torch.matmul(q * scale, k)
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    hidden = (key_position[:, None, :] > row_position[:, :, None]) | (key_position[:, None, :] < 0)
    if window:
        hidden |= key_position[:, None, :] <= row_position[:, :, None] - window
    logits.masked_fill_(hidden[:, None], float("-inf"))
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    sink = sinks.float()[None, :, None, None].expand(logits.shape[0], -1, logits.shape[2], 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]
