"""From the user's arguments to vLLM's: the worker class, the layers kept, and CPU defaults."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import compat
from .errors import ProbeError, UnsupportedModelError, UnsupportedVLLMError
from .specs import Head, ModelInfo

logger = logging.getLogger(__name__)

CPU_BLOCK_SIZE = 32
CPU_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Arguments for ``vllm.LLM``, and the layers of the checkpoint before any were cut."""

    engine: dict[str, Any]
    num_layers: int


def engine_options(
    model: str,
    heads: Sequence[Head],
    layers: int | Literal["auto"] | None,
    given: dict[str, Any],
    *,
    data_parallel: bool = False,
    programs: bool = False,
) -> EngineOptions:
    """Check and complete the engine arguments; see `HookLLM` for what they mean.

    ``data_parallel`` says that the caller can fetch from several engines.
    """
    engine = dict(given)
    _refuse_modes(engine)
    if not data_parallel and (engine.get("data_parallel_size") or 1) > 1:
        raise UnsupportedVLLMError(
            f"data_parallel_size={engine['data_parallel_size']}: vLLM's LLM runs one engine only. "
            "Use AsyncHookLLM or ThreadedHookLLM (backend='vllm-async' of a Reranker)."
        )
    _check_extension(engine.get("worker_extension_cls"))
    engine["worker_cls"] = _worker(engine.get("worker_cls"), heads, programs)
    if compat.is_cpu():
        _let_kernel_search_pass(engine)
        _cpu_defaults(engine)
    outer = _hf_config(model, engine)
    config = outer.get_text_config()
    kept = _kept_layers(config.num_hidden_layers, heads, layers)
    if kept < config.num_hidden_layers:
        obstacle = _uncuttable(engine, outer, config)
        if obstacle is None:
            _cut_layers(engine, config, kept)
        elif layers == "auto":
            logger.info("all %d layers are kept: %s", config.num_hidden_layers, obstacle)
        else:
            raise UnsupportedVLLMError(f"layers={layers!r} is not possible: {obstacle}.")
    if programs:
        _name_in_cache_key(engine, "doors")
    return EngineOptions(engine, config.num_hidden_layers)


def check_running(vllm_config: Any, *, data_parallel: bool = False) -> None:
    """Refuse what vLLM made of the arguments, should it be one of the modes ruled out."""
    parallel = vllm_config.parallel_config
    modes = {
        "a KV connector": getattr(vllm_config, "kv_transfer_config", None) is not None,
        "speculative decoding": getattr(vllm_config, "speculative_config", None) is not None,
        "micro-batching (ubatch_size, enable_dbo)": getattr(parallel, "use_ubatching", False),
        "data parallelism": parallel.data_parallel_size > 1 and not data_parallel,
    }
    running = [name for name, on in modes.items() if on]
    if running:
        raise UnsupportedVLLMError(
            f"captures cannot be combined with {', '.join(running)}: the engine arguments turned "
            "that on; leave it off."
        )


def _refuse_modes(engine: dict[str, Any]) -> None:
    refused = {
        "kv_transfer_config": "keys loaded from a KV connector were never seen by the capture",
        "speculative_config": "draft layers and rolled-back tokens are not followed yet",
        "spec_method": "draft layers and rolled-back tokens are not followed yet",
        "spec_model": "draft layers and rolled-back tokens are not followed yet",
        "kv_offloading_size": "offloaded keys are not followed by the capture",
        "enable_dbo": "dual-batch overlap splits a step in two",
    }
    for option, reason in refused.items():
        if engine.get(option):
            raise UnsupportedVLLMError(f"{option} cannot be combined with captures: {reason}.")
    for option in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (engine.get(option) or 1) > 1:
            raise UnsupportedVLLMError(
                f"{option}={engine[option]} spreads one request's keys over workers, "
                "which a capture does not follow; use tensor_parallel_size."
            )


def _worker(user: str | None, heads: Sequence[Head], programs: bool) -> str:
    from .worker import worker_name

    return worker_name(None if user in (None, "auto") else user, heads, programs)


def _check_extension(user: str | None) -> None:
    from .worker import HookMixin

    if not user:
        return
    resolve = compat.symbol("vllm.utils.import_utils", "resolve_obj_by_qualname")
    own = {n for n in dir(HookMixin) if not n.startswith("__")}
    clash = sorted(own & set(dir(resolve(user))))
    if clash:
        raise UnsupportedVLLMError(
            f"worker_extension_cls={user!r} cannot be combined with the runtime's worker: both "
            f"define {', '.join(clash)}. Rename them in {user}."
        )


def _let_kernel_search_pass(engine: dict[str, Any]) -> None:
    """Here, and in the engine's processes before they start a worker."""
    compat.let_kernel_search_pass()
    extra = engine.get("additional_config") or {}
    if isinstance(extra, dict):
        engine["additional_config"] = {**extra, "hook_runtime_start": compat.KernelSearchPass("")}


def _cpu_defaults(engine: dict[str, Any]) -> None:
    """vLLM's CPU defaults take 92 % of the memory and share prefixes in blocks of 128 tokens."""
    import psutil

    engine.setdefault("block_size", CPU_BLOCK_SIZE)
    if "kv_cache_memory_bytes" not in engine and "gpu_memory_utilization" not in engine:
        free = psutil.virtual_memory().available
        engine["kv_cache_memory_bytes"] = min(CPU_CACHE_BYTES, free // 4)


def _hf_config(model: str, engine: dict[str, Any]) -> Any:
    get_config = compat.symbol("vllm.transformers_utils.config", "get_config")
    return get_config(
        engine.get("hf_config_path") or model,
        trust_remote_code=bool(engine.get("trust_remote_code", False)),
        revision=engine.get("revision"),
        config_format=engine.get("config_format") or "auto",
    )


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


def _uncuttable(engine: dict[str, Any], outer: Any, config: Any) -> str | None:
    """Why the model's last layers cannot be left out, if so."""
    load_format = str(engine.get("load_format") or "auto")
    if load_format not in ("auto", "safetensors", "hf", "dummy"):
        return f"load_format={load_format!r} cannot skip layers; use 'auto' or 'safetensors'"
    if not isinstance(engine.get("hf_overrides") or {}, dict):
        return "hf_overrides is a function, which cannot be combined with it"
    if outer is not config:
        return f"{type(outer).__name__} nests the language model's config"
    if getattr(config, "scale_depth", None) is not None:
        return "the model scales its residual stream by the number of layers (scale_depth)"
    return None


def _cut_layers(engine: dict[str, Any], config: Any, kept: int) -> None:
    from .loader import FIRST_LAYERS, FIRST_LAYERS_DUMMY, first_layers

    dummy = str(engine.get("load_format") or "auto") == "dummy"
    engine["load_format"] = FIRST_LAYERS_DUMMY if dummy else FIRST_LAYERS
    engine["hf_overrides"] = {**(engine.get("hf_overrides") or {}), **first_layers(config, kept)}
    _name_in_cache_key(engine, "reads only")


def _name_in_cache_key(engine: dict[str, Any], what: str) -> None:
    """The model is not compiled as it stands: vLLM's compile cache must tell it from one that is,
    and this is the one setting that reaches its key."""
    extra = dict(engine.get("additional_config") or {})
    names = [*filter(None, [extra.get("hook_runtime")]), what]
    engine["additional_config"] = {**extra, "hook_runtime": ", ".join(names)}


def raise_refusal(installed: list[dict[str, Any]]) -> None:
    """Raise what a worker answered to the installation, should it have refused."""
    kinds = {e.__name__: e for e in (UnsupportedModelError, UnsupportedVLLMError)}
    for rank in installed:
        if "error" in rank:
            raise kinds.get(rank["kind"], UnsupportedModelError)(rank["error"])


def model_info(
    vllm_config: Any, name: str, options: EngineOptions, installed: list[dict[str, Any]]
) -> ModelInfo:
    """Describe the running model; ``installed`` is every worker's answer to the installation."""
    config = vllm_config.model_config
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
