"""A tiny llama with GPTQ, AWQ or fp8 weights, and the same weights dequantised for the oracle.

Activations stay in the model's dtype: only so does transformers give an oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from core_rerank.eval.shapes import copy_tokenizer

GROUP = 64
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each nibble of an AWQ integer holds, from the lowest nibble up."""
METHODS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False,
             "sym": True, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm"},
    "fp8": {"quant_method": "compressed-tensors", "format": "float-quantized",
            "quantization_status": "compressed", "ignore": ["lm_head"],
            "config_groups": {"group_0": {
                "targets": ["Linear"], "input_activations": None, "output_activations": None,
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel",
                            "symmetric": True, "dynamic": False}}}},
}  # fmt: skip


def make_quantised(method: str, folder: Path, tokenizer: Path) -> Path:
    """Folder of the checkpoint for vLLM; its ``dequantised`` subfolder is transformers'."""
    import torch
    from safetensors.torch import save_file

    target = folder / f"llama-{method}"
    if (target / "complete").exists():
        return target
    model = _model()
    weights = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):
            del weights[f"{name}.weight"]
            packed, exact = _fp8(module.weight) if method == "fp8" else _int4(module.weight, method)
            module.weight.data = exact
            weights.update({f"{name}.{key}": value for key, value in packed.items()})
    model.save_pretrained(target / "dequantised")
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    config = json.loads((target / "dequantised" / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = METHODS[method]
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    copy_tokenizer(tokenizer, target)
    (target / "complete").touch()
    return target


def _model() -> Any:
    """A random llama whose sizes suit the 4-bit kernels of CPUs and GPUs."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.data.normal_(0.0, 0.08 if "q_proj" in name or "k_proj" in name else 0.05)
    return model


def _fp8(weights: Any) -> tuple[dict[str, Any], Any]:
    """One scale a row; the stored tensors, and the weights [out, in] that they stand for."""
    import torch

    scale = weights.detach().abs().amax(dim=1, keepdim=True) / 448
    stored = (weights.detach() / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, (stored.float() * scale).contiguous()


def _int4(weights: Any, method: str) -> tuple[dict[str, Any], Any]:
    """The stored tensors, and the weights [out, in] that they stand for."""
    import torch

    q, zeros, scales = _quantise(weights.detach().T)
    levels = q.float() - zeros.float().repeat_interleave(GROUP, 0)
    exact = (levels * scales.repeat_interleave(GROUP, 0)).T.contiguous()
    packed = _gptq(q) if method == "gptq" else _awq(q, zeros)
    return {**packed, "scales": scales.to(torch.float16)}, exact


def _quantise(weights: Any) -> tuple[Any, Any, Any]:
    """Float [in, out] to levels 0..15 [in, out], zero points and scales [groups, out].

    The zero point is 8 everywhere, as symmetric GPTQ has it; scales are float16 numbers.
    """
    import torch

    rows, columns = weights.shape
    groups = weights.reshape(rows // GROUP, GROUP, columns)
    scales = (groups.abs().amax(dim=1) / 7).to(torch.float16).float()
    levels = torch.round(groups / scales[:, None]).clamp(-8, 7) + 8
    zeros = torch.full_like(scales, 8, dtype=torch.int32)
    return levels.reshape(rows, columns).to(torch.int32), zeros, scales


def _gptq(q: Any) -> dict[str, Any]:
    """Eight rows an integer; GPTQ keeps zero points less one, and the group of every row."""
    import torch

    rows, columns = q.shape
    zeros = torch.full((rows // GROUP, columns), 7, dtype=torch.int32)
    return {
        "qweight": _pack(q.T.reshape(columns, rows // 8, 8), range(8)).T.contiguous(),
        "qzeros": _pack(zeros.reshape(-1, columns // 8, 8), range(8)),
        "g_idx": torch.arange(rows, dtype=torch.int32) // GROUP,
    }


def _awq(q: Any, zeros: Any) -> dict[str, Any]:
    """Eight columns an integer, in AWQ's order."""
    rows, columns = q.shape
    return {
        "qweight": _pack(q.reshape(rows, columns // 8, 8), AWQ_ORDER),
        "qzeros": _pack(zeros.reshape(-1, columns // 8, 8), AWQ_ORDER),
    }


def _pack(levels: Any, order: Any) -> Any:
    """[..., 8] numbers below 16 to [...] int32; ``order[i]`` is put into nibble i."""
    import torch

    packed = torch.zeros(levels.shape[:-1], dtype=torch.int64)
    for nibble, place in enumerate(order):
        packed |= levels[..., place].to(torch.int64) << (4 * nibble)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return packed.to(torch.int32).contiguous()
