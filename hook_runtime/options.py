"""From the user's arguments to vLLM's: the worker extension, the layers kept, and CPU defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import compat
from .errors import ProbeError, UnsupportedVLLMError
from .specs import Head, ModelInfo

CPU_BLOCK_SIZE = 32
CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Arguments for ``vllm.LLM``, and the layers of the checkpoint before any were cut."""

    engine: dict[str, Any]
    num_layers: int


def engine_options(
    model: str, heads: Sequence[Head], layers: int | Literal["auto"] | None, given: dict[str, Any]
) -> EngineOptions:
    """Check and complete the engine arguments; see `HookLLM` for what they mean."""
    engine = dict(given)
    _refuse_modes(engine)
    engine["worker_extension_cls"] = _extension(engine.get("worker_extension_cls"))
    if compat.is_cpu():
        _cpu_defaults(engine)
    config = _text_config(model, engine)
    kept = _kept_layers(config.num_hidden_layers, heads, layers)
    if kept < config.num_hidden_layers:
        _cut_layers(engine, config, kept)
    return EngineOptions(engine, config.num_hidden_layers)


def _refuse_modes(engine: dict[str, Any]) -> None:
    refused = {
        "kv_transfer_config": "keys loaded from a KV connector were never seen by the capture",
        "speculative_config": "draft layers and rolled-back tokens are not followed yet",
        "spec_method": "draft layers and rolled-back tokens are not followed yet",
        "enable_dbo": "dual-batch overlap splits a step in two",
    }
    for option, reason in refused.items():
        if engine.get(option):
            raise UnsupportedVLLMError(f"{option} cannot be combined with captures: {reason}.")
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if engine.get(option, 1) > 1:
            raise UnsupportedVLLMError(
                f"{option}={engine[option]} spreads one request's keys over workers, "
                "which a capture does not follow; use tensor_parallel_size."
            )
    if engine.get("data_parallel_size", 1) > 1:
        raise UnsupportedVLLMError(
            f"data_parallel_size={engine['data_parallel_size']}: only the first engine's captures "
            "can be fetched; start one HookLLM per GPU instead."
        )


def _extension(user: str | None) -> str:
    from . import worker

    if not user:
        return worker.EXTENSION
    resolve = compat.symbol("vllm.utils.import_utils", "resolve_obj_by_qualname")
    own = {n for n in dir(worker.WorkerExtension) if not n.startswith("__")}
    clash = sorted(own & set(dir(resolve(user))))
    if clash:
        raise UnsupportedVLLMError(
            f"worker_extension_cls={user!r} cannot be combined with {worker.EXTENSION}: both "
            f"define {', '.join(clash)}. Rename them in {user}."
        )
    return worker.composed_name(user)


def _cpu_defaults(engine: dict[str, Any]) -> None:
    """vLLM's CPU defaults take 92 % of the memory and share prefixes in blocks of 128 tokens."""
    import psutil

    engine.setdefault("block_size", CPU_BLOCK_SIZE)
    if "kv_cache_memory_bytes" not in engine and "gpu_memory_utilization" not in engine:
        free = psutil.virtual_memory().available
        engine["kv_cache_memory_bytes"] = min(CPU_CACHE_BYTES, free // 4)


def _text_config(model: str, engine: dict[str, Any]) -> Any:
    get_config = compat.symbol("vllm.transformers_utils.config", "get_config")
    config = get_config(
        model,
        trust_remote_code=bool(engine.get("trust_remote_code", False)),
        revision=engine.get("revision"),
    )
    return config.get_text_config()


def _kept_layers(total: int, heads: Sequence[Head], layers: int | Literal["auto"] | None) -> int:
    if layers is None:
        return total
    if layers == "auto":
        if not heads:
            raise ProbeError("layers='auto' needs heads: it keeps the layers up to the last one.")
        return min(total, max(h.layer for h in heads) + 1)
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= total:
        raise ProbeError(f"layers={layers!r}: expected None, 'auto' or a number from 1 to {total}.")
    return layers


def _cut_layers(engine: dict[str, Any], config: Any, kept: int) -> None:
    from .loader import LOAD_FORMAT, first_layers

    load_format = str(engine.get("load_format", "auto"))
    if load_format in ("auto", "safetensors", "hf"):
        engine["load_format"] = LOAD_FORMAT
    elif load_format != "dummy":
        raise UnsupportedVLLMError(
            f"load_format={load_format!r} cannot skip layers: use layers=None, "
            "or load_format 'auto', 'safetensors' or 'dummy'."
        )
    given = engine.get("hf_overrides") or {}
    if not isinstance(given, dict):
        raise UnsupportedVLLMError("layers and a callable hf_overrides cannot be combined.")
    cut = first_layers(config, kept)
    engine["hf_overrides"] = {**given, **cut}


def model_info(
    llm: Any, name: str, options: EngineOptions, installed: list[dict[str, Any]]
) -> ModelInfo:
    """Describe the running model; ``installed`` is every worker's answer to the installation."""
    config = llm.llm_engine.vllm_config.model_config
    text = compat.attribute(config, "hf_text_config")
    return ModelInfo(
        name=name,
        revision=config.revision,
        num_layers=options.num_layers,
        layers_kept=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        max_model_len=config.max_model_len,
        dtype=installed[0]["dtype"],
        device=installed[0]["device"],
        backend="vllm",
    )
