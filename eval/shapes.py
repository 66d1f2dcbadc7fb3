"""Published model shapes with random weights, and the arithmetic that a prompt costs on them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
CORE_HEADS = ("15-21", "15-1", "16-12", "15-7", "9-26", "12-11", "12-7", "18-0")
"""The 8 heads that CoRe (arXiv 2510.02219) publishes for Mistral-7B-Instruct-v0.2."""


MIDDLE_HEADS_70B = tuple(f"{30 + i}-{(11 * i) % 64}" for i in range(16))
"""16 heads in the middle of 80 layers, on every eighth of the heads: a place, not a finding."""


def tokenizer_folder(given: Path | None) -> Path:
    """``given``, or the embedded model's folder, which holds SmolLM2's tokenizer."""
    if given is not None:
        return given
    from core_rerank.models import resolve_model

    return Path(resolve_model("smollm2-135m-instruct").path_or_id)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer's files that ``source`` has to ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy(source / name, folder / name)


def mistral_7b(folder: Path, tokenizer: Path) -> Path:
    """Write Mistral-7B's config without its sliding window, for ``load_format="dummy"``.

    The vocabulary is the tokenizer's: only one row of logits a prompt depends on it.
    """
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=_vocabulary(tokenizer),
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32768,
        sliding_window=None,
    )
    return _write(config, "MistralForCausalLM", folder, tokenizer)


def llama_70b(folder: Path, tokenizer: Path) -> Path:
    """Write the config of Llama-3.1-70B's shape, for ``load_format="dummy"``."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=_vocabulary(tokenizer),
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    return _write(config, "LlamaForCausalLM", folder, tokenizer)


def qwen3_06b_classifier(folder: Path, tokenizer: Path) -> Path:
    """Write Qwen3-0.6B's config as a sequence classifier with one label."""
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=max(151936, _vocabulary(tokenizer)),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    config.num_labels = 1
    return _write(config, "Qwen3ForSequenceClassification", folder, tokenizer)


def _vocabulary(tokenizer: Path) -> int:
    from transformers import AutoTokenizer

    size = len(AutoTokenizer.from_pretrained(tokenizer))
    return -(-size // 64) * 64  # a multiple of 64, as published models have it


def _write(config: Any, architecture: str, folder: Path, tokenizer: Path) -> Path:
    copy_tokenizer(tokenizer, folder)
    config.architectures = [architecture]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations, a multiplication and an addition counted as two.

    ``weights`` are those of the products with weight matrices, ``attention`` those of queries
    with keys and of probabilities with values, causal.
    """

    weights: float
    attention: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.weights + self.attention


def work(config: Any, layers: int, computed: Iterable[tuple[int, int]]) -> Work:
    """What ``layers`` layers of a Llama-like ``config`` do for half-open spans of positions.

    A span is what one request computes: it begins at the end of the prefix that the cache holds.
    Per layer and token: 2 x (query and output projection + key and value projection + three MLP
    matrices) with weights, 4 x heads x head_dim x keys seen in attention; and one row of logits
    per span.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    matrices = 2 * hidden * head_dim * (heads + config.num_key_value_heads)
    matrices += 3 * hidden * config.intermediate_size
    weights = attention = 0.0
    for start, stop in computed:
        weights += 2.0 * matrices * layers * (stop - start) + 2.0 * hidden * config.vocab_size
        seen = (stop * (stop + 1) - start * (start + 1)) / 2
        attention += 4.0 * heads * head_dim * layers * seen
    return Work(weights, attention)
