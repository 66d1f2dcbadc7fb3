"""The folders of models that engines start on: tiny random ones, refused ones, SmolLM2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_models import ARCHITECTURES, SPLIT, make_tiny

from core_rerank.eval.shapes import copy_tokenizer

QUANTISED = ("llama-gptq", "llama-awq", "llama-fp8")


@dataclass(frozen=True, slots=True)
class Models:
    """Makes what is asked for below ``folder``, once.

    ``tokenizer`` is a folder of SmolLM2's tokenizer files; ``smollm2`` its checkpoint, if at hand.
    """

    folder: Path
    tokenizer: Path
    smollm2: Path | None

    def missing(self, name: str) -> str:
        """Why there can be no such model here, if so."""
        if name == "smollm2" and self.smollm2 is None:
            return "SmolLM2's weights are not here: give --smollm2 DIR"
        return ""

    def path(self, name: str) -> Path:
        """Folder of a model by the name that scenarios use.

        For the engines' process alone: transformers loads a model under a default dtype that all
        threads of a process share, and the driver's process loads oracles in a thread.
        """
        if name == "smollm2" and self.smollm2 is not None:
            return self.smollm2
        if name in ARCHITECTURES or name in SPLIT:
            return make_tiny(name, self.folder, self.tokenizer)
        if name in REFUSED:
            return self._random(name)
        if name in QUANTISED:
            from .quantised import make_quantised

            return make_quantised(name.removeprefix("llama-"), self.folder, self.tokenizer)
        raise KeyError(f"no model {name!r}")

    def oracle(self, name: str, path: Path) -> Path:
        """Folder of the checkpoint that transformers reads for ``name``."""
        return path / "dequantised" if name in QUANTISED else path

    def adapters(self, base: Path) -> tuple[tuple[str, Path, Path], ...]:
        """Two LoRA adapters for ``base``: name, adapter's folder, merged model's folder."""
        from .adapters import make_adapter

        folder = self.folder / "lora"
        return tuple((f"adapter-{s}", *make_adapter(base, folder, s)) for s in (1, 2))

    def _random(self, name: str) -> Path:
        import torch
        from transformers import AutoModelForCausalLM

        target = self.folder / name
        if not (target / "complete").exists():
            with torch.random.fork_rng():
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(REFUSED[name]()).save_pretrained(target)
            copy_tokenizer(self.tokenizer, target)
            (target / "complete").touch()
        return target


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        vocab_size=49152,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        first_k_dense_replace=2,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        max_position_embeddings=2048,
    )


def _bloom() -> Any:
    from transformers import BloomConfig

    return BloomConfig(vocab_size=49152, hidden_size=128, n_layer=2, n_head=4)


REFUSED: dict[str, Any] = {"deepseek_v2": _deepseek_v2, "bloom": _bloom}
