"""LoRA: tiny random adapters with merged models as their oracles, and the condition on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prompts import NULL_QUERY, QUERIES

from .session import NotMet, Observed, Session

RANK = 8
ALPHA = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def make_adapter(base: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """A random adapter on the attention's projections, and the base model with it merged in."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    adapter, merged = folder / f"adapter-{seed}", folder / f"merged-{seed}"
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights: dict[str, Any] = {}
    modules: Any = model.named_modules()
    for name, module in modules:
        if name.rsplit(".", 1)[-1] not in TARGETS:
            continue
        rows, columns = module.weight.shape
        a = torch.randn(RANK, columns, generator=generator) * 0.05
        b = torch.randn(rows, RANK, generator=generator) * 0.05
        module.weight.data += ALPHA / RANK * (b @ a)
        weights[f"base_model.model.{name}.lora_A.weight"] = a
        weights[f"base_model.model.{name}.lora_B.weight"] = b
    adapter.mkdir(parents=True, exist_ok=True)
    save_file(weights, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    model.save_pretrained(merged)
    return adapter, merged


def lora(session: Session) -> Observed:
    """Two adapters and none with the same prompts, then again from the cache.

    All in one batch, but on a CPU: there vLLM 0.32 gives a request without an adapter the last one
    of its batch (the index -1 reaches torch), so that no oracle could be right.
    """
    from vllm.lora.request import LoRARequest

    if not session.adapters:
        raise NotMet("this engine has no adapters")
    seen = Observed()
    session.cold()
    variants: list[tuple[Any, Path]] = [(None, session.model)]
    for number, (name, folder, merged) in enumerate(session.adapters, start=1):
        variants.append((LoRARequest(name, number, str(folder)), merged))
    requests = session.products(QUERIES[0], NULL_QUERY)
    batches = [variants] if session.device == "gpu" else [variants[1:], variants[:1]]
    for batch in batches * 2:
        jobs = [(request, *variant) for request in requests for variant in batch]
        captures = session.engine.capture(
            [request for request, _, _ in jobs], lora_request=[adapter for _, adapter, _ in jobs]
        )
        for (request, _, model), capture in zip(jobs, captures, strict=True):
            session.keep(seen, [request], [capture], model)
    if session.device == "cpu":
        seen.notes.append("requests without an adapter in a batch of their own: vLLM on CPUs")
    return seen
