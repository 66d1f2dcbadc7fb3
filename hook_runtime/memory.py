"""What a shadow of chosen heads costs in memory, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import compat
from .specs import Head

MARGIN = 0.9
"""Share of the free memory that a shadow may take after start-up: activations need some too."""


def heads_by_layer(heads: Iterable[Head]) -> dict[int, list[int]]:
    """Layer number -> ascending head numbers."""
    found: dict[int, list[int]] = {}
    for layer, head in sorted(heads):
        found.setdefault(layer, []).append(head)
    return found


def slot_bytes(heads: Sequence[int], heads_per_kv: int, head_dim: int, itemsize: int) -> int:
    """Bytes that one token takes in one layer's shadow: its queries, and each key head once."""
    keys = {h // heads_per_kv for h in heads}
    return (len(heads) + len(keys)) * head_dim * itemsize


def shadow_share(vllm_config: Any, specs: Mapping[str, Any], heads: Iterable[Head]) -> float:
    """Bytes of this worker's shadow per byte of its KV cache, before that cache exists.

    ``specs`` maps each attention layer's name to vLLM's KV-cache spec.
    """
    itemsize = vllm_config.model_config.dtype.itemsize
    rank = compat.tensor_parallel_rank()
    modules = compat.decoder_attention(vllm_config)
    shadow = 0
    for layer, chosen in heads_by_layer(heads).items():
        if layer not in modules or modules[layer][0] not in specs:
            continue
        name, module = modules[layer]
        first = rank * module.num_heads
        local = [h - first for h in chosen if first <= h < first + module.num_heads]
        per_kv = module.num_heads // module.num_kv_heads
        size = slot_bytes(local, per_kv, module.head_size, itemsize)
        shadow += size * int(specs[name].block_size)
    return shadow / compat.pool_bytes_per_block(vllm_config, specs)


def free_bytes(device: Any) -> int:
    """Memory that a new allocation on the worker's device may take."""
    import torch

    if device.type != "cuda":
        import psutil

        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def readable(size: float) -> str:
    """``"1.5 GiB"`` or ``"12 MiB"``."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
