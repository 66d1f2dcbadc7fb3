"""Tiny random checkpoints, one per supported architecture, that transformers and vLLM both load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from core_rerank.eval.shapes import copy_tokenizer

ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SEED = 20240607


def _common(**changes: Any) -> dict[str, Any]:
    """Settings shared by the architectures: 6 query heads on 2 key/value heads of 32 numbers."""
    settings: dict[str, Any] = {
        "vocab_size": 49152,
        "hidden_size": 192,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": True,
    }
    settings.update(changes)
    return settings


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_common(head_dim=32))


def _llama_8() -> Any:
    """8 query heads on 4 key/value heads: over 8 workers each of the latter is held twice."""
    from transformers import LlamaConfig

    return LlamaConfig(**_common(head_dim=32, num_attention_heads=8, num_key_value_heads=4))


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_common(head_dim=64, sliding_window=70))


def _qwen2() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**_common(num_attention_heads=12, num_key_value_heads=4, hidden_size=384))


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**_common(head_dim=64))


def _phi3() -> Any:
    from transformers import Phi3Config

    return Phi3Config(**_common())


def _granite() -> Any:
    from transformers import GraniteConfig

    return GraniteConfig(
        **_common(),
        attention_multiplier=0.1,
        embedding_multiplier=6.0,
        residual_multiplier=0.3,
        logits_scaling=2.0,
    )


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **_common(head_dim=64, num_attention_heads=4),
        query_pre_attn_scalar=100,
        sliding_window=70,
        attn_logit_softcapping=5.0,
        layer_types=list(ALTERNATING),
    )


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **_common(head_dim=64),
        query_pre_attn_scalar=100,
        sliding_window=70,
        layer_types=list(ALTERNATING),
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        **_common(
            hidden_size=256,
            head_dim=64,
            max_position_embeddings=131072,
            tie_word_embeddings=False,
        ),
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=70,
        layer_types=list(ALTERNATING),
    )


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "phi3": _phi3,
    "granite": _granite,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt_oss": _gpt_oss,
}
SPLIT = {"llama_8": _llama_8}
"""What is split over more workers than the others allow."""


def make_tiny(arch: str, folder: Path, tokenizer: Path) -> Path:
    """Write a random checkpoint of ``arch`` and the tokenizer's files to ``folder / arch``.

    The same ``arch`` always gets the same float32 weights. Query and key projections are scaled so
    that attention logits have a standard deviation of about one to three: flat enough for float32
    comparisons to mean something, peaked enough that a wrong scale or mask shows. A folder that
    is already complete is re-used.
    """
    import torch
    from transformers import AutoModelForCausalLM

    target = folder / arch
    if (target / "complete").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(
            {**ARCHITECTURES, **SPLIT}[arch](), dtype=torch.float32
        )
        with torch.no_grad():
            for name, weights in model.named_parameters():
                _fill(name, weights)
    model.save_pretrained(target)
    copy_tokenizer(tokenizer, target)
    (target / "complete").touch()
    return target


def _fill(name: str, weights: Any) -> None:
    import torch

    if "sinks" in name:
        weights.normal_(1.0, 1.0)
    elif "norm" in name:
        weights.add_(0.2 * torch.randn_like(weights))
    elif any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) and weights.dim() > 1:
        weights.normal_(0.0, 0.1)
    else:
        weights.normal_(0.0, 0.05)
