"""The independent reference: transformers' eager attention, read whole and indexed plainly."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hook_runtime.specs import CaptureRequest


def reference_attention(
    model_dir: str | Path,
    requests: Sequence[CaptureRequest],
    dtype: Any = None,
    device: str = "cpu",
) -> list[np.ndarray]:
    """What each request's capture must be: float32 [heads, columns], in request order.

    ``dtype`` and ``device`` are torch's, of what the model runs in, by default float32 on the CPU;
    the averages over the query rows are taken in float64. Holds the attention of every layer:
    short prompts only.
    """
    import torch

    model = _model(str(model_dir), dtype or torch.float32, device)
    answers = []
    for request in requests:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor([request.prompt_token_ids], device=device),
                output_attentions=True,
                use_cache=False,
            )
        probe = request.probe
        first, last = probe.query_span
        layers = [w[0, :, first:last].double().mean(dim=1).cpu().numpy() for w in output.attentions]
        heads = probe.heads
        if heads == "all":
            heads = [(i, h) for i in range(len(layers)) for h in range(layers[0].shape[0])]
        rows = []
        for layer, head in heads:
            pieces = [layers[layer][head, start:end] for start, end in probe.spans]
            if probe.reduction == "documents":
                pieces = [np.array([piece.sum()]) for piece in pieces]
            rows.append(np.concatenate(pieces))
        answers.append(np.stack(rows).astype(np.float32))
    return answers


def rounding_of_gaps(model_dir: str | Path, tokens: Sequence[int], start: int, dtype: Any) -> float:
    """What ``dtype`` does to the likeliest token's lead over the next four: its largest change.

    Nats, over the positions that choose ``tokens[start:]``, against float32; on the CPU. End the
    tokens with the one whose choice is in doubt: what comes later excuses nothing.
    """
    import torch

    def chances(kind: Any) -> Any:
        with torch.no_grad():
            logits = _model(str(model_dir), kind, "cpu")(torch.tensor([list(tokens)])).logits
        return logits[0, start - 1 : -1].double().log_softmax(dim=-1)

    exact, rounded = chances(torch.float32), chances(dtype)
    best = exact.topk(5).indices
    leads = [x.gather(1, best[:, :1]) - x.gather(1, best[:, 1:]) for x in (exact, rounded)]
    return float((leads[1] - leads[0]).abs().max())


@functools.lru_cache(maxsize=1)
def _model(model_dir: str, dtype: Any, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_dir, attn_implementation="eager", dtype=dtype
    )
    return model.to(device).eval()
