"""The engines of the table, as data: model, arguments, conditions, and what a start costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Refusal = Literal["never", "must", "may"]

ORDINARY = ("cold", "repeat", "pair", "warm", "mixed", "head-sets", "all-heads", "ordinary-prefix")
CHUNKED = (
    "rows-across-chunks",
    "more-rows-than-a-chunk",
    "last-chunk-of-one-token",
    "last-query-token-alone",
)
SHORT = ("cold", "repeat", "mixed")
GRAPHS = ("cold", "repeat", "mixed", "last-chunk-of-one-token", "last-query-token-alone")
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
TINY_CACHE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 512,
    "num_gpu_blocks_override": 24,
    "max_num_batched_tokens": 512,
    "long_prefill_token_threshold": 40,
    "scheduler_reserve_full_isl": False,
    "disable_log_stats": False,
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One engine, and the conditions tried on it, in order.

    ``cpu_s`` and ``gpu_s`` are the seconds it takes there in all, None where it does not run;
    ``absent`` then says why. ``dtype`` None is float32 on a CPU, bfloat16 on a GPU. ``in_process``
    engines start faster. ``refusal`` says whether the start must, may or must never be refused;
    "may" goes for vLLM's own refusals too.
    """

    name: str
    model: str = "llama"
    conditions: tuple[str, ...] = ORDINARY
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    cpu_s: float | None = 15
    gpu_s: float | None = 15
    absent: str = ""
    gpus: int = 1
    in_process: bool = True
    refusal: Refusal = "never"

    def dtype_on(self, device: str) -> str:
        return self.dtype or ("float32" if device == "cpu" else "bfloat16")

    def seconds_on(self, device: str) -> float | None:
        return self.cpu_s if device == "cpu" else self.gpu_s

    def process(self) -> tuple[Any, ...]:
        """Scenarios with the same answer may share a process."""
        return (self.in_process, tuple(sorted(self.environment.items())))


def _graphs(mode: str, runner: str, environment: Mapping[str, str]) -> Scenario:
    return Scenario(
        f"CUDA graphs {mode}, {runner}",
        conditions=GRAPHS,
        arguments={
            "compilation_config": {"cudagraph_mode": mode},
            "max_num_batched_tokens": 64,
        },
        environment=environment,
        cpu_s=None,
        gpu_s=18,
        absent="CUDA graphs need a GPU",
    )


def _programs(name: str, environment: Mapping[str, str] | None = None, **how: Any) -> Scenario:
    """Programs where the model is compiled, in graphs that only a GPU has but for the default."""
    everywhere = not how and environment is None
    return Scenario(
        f"programs, {name}",
        conditions=("programs", "mixed"),
        arguments={"programs": True, **how},
        environment=environment or {},
        cpu_s=40 if everywhere else None,
        gpu_s=30,
        absent="" if everywhere else "CUDA graphs need a GPU",
    )


def _eager(name: str, conditions: tuple[str, ...], **more: Any) -> Scenario:
    arguments = {"enforce_eager": True, **more.pop("arguments", {})}
    return Scenario(name, conditions=conditions, arguments=arguments, **more)


def _architecture(arch: str) -> Scenario:
    return _eager(
        f"architecture {arch}",
        ("cold", "repeat", "pair", "warm", "mixed", "all-heads", "rows-inside-the-hit"),
        model=arch,
        arguments={"max_num_batched_tokens": 256},
        gpu_s=9,
        cpu_s=12,
    )


def _refused(
    name: str, model: str = "llama", *, starts: bool = False, **arguments: Any
) -> Scenario:
    return _eager(
        f"refused: {name}",
        ("refusal",),
        model=model,
        arguments=arguments,
        refusal="must",
        cpu_s=6 if starts else 1,
        gpu_s=8 if starts else 1,
    )


ARCHS = ("mistral", "qwen2", "qwen3", "phi3", "granite", "gemma2", "gemma3", "gpt_oss")

SCENARIOS: tuple[Scenario, ...] = (
    # The runner that vLLM chooses by itself.
    Scenario(
        "SmolLM2, as vLLM starts it",
        "smollm2",
        ("cold", "repeat", "pair", "warm", "mixed", "all-heads"),
        cpu_s=90,
        gpu_s=55,
        in_process=False,
    ),
    Scenario("tiny llama, compiled", cpu_s=30, gpu_s=25),
    _graphs("FULL_AND_PIECEWISE", "default runner", {}),
    _graphs("PIECEWISE", "default runner", {}),
    _graphs("FULL_DECODE_ONLY", "default runner", {}),
    _graphs("NONE", "default runner", {}),
    _programs("compiled"),
    _programs("CUDA graphs PIECEWISE", compilation_config={"cudagraph_mode": "PIECEWISE"}),
    _eager("programs, eager", ("programs", "mixed")),
    _eager(
        "chunks of 64, eager",
        (*CHUNKED, "mixed", "cancelled"),
        arguments={"max_num_batched_tokens": 64},
    ),
    _eager("tiny cache", ("prefix-evicted", "preempted", "warm"), arguments=TINY_CACHE),
    _eager(
        "priority scheduling, tiny cache",
        ("cold", "repeat", "preempted"),
        arguments={**TINY_CACHE, "scheduling_policy": "priority"},
    ),
    _eager(
        "no prefix cache",
        ("cold", "repeat", "pair", "warm", "mixed", "all-heads"),
        arguments={"enable_prefix_caching": False},
    ),
    _eager(
        "async scheduling on",
        ("pair", "mixed", *CHUNKED),
        arguments={"async_scheduling": True, "max_num_batched_tokens": 64},
    ),
    _eager(
        "async scheduling off",
        ("pair", "mixed", *CHUNKED),
        arguments={"async_scheduling": False, "max_num_batched_tokens": 64},
    ),
    *map(_architecture, ARCHS),
    Scenario(
        "gpt_oss, compiled",
        "gpt_oss",
        ("cold", "repeat", "mixed"),
        cpu_s=None,
        gpu_s=25,
        absent="the architecture's eager row stands for it",
    ),
    _eager(
        "LoRA",
        ("lora", "cold", "mixed"),
        arguments={"enable_lora": True, "max_loras": 2, "max_lora_rank": 8},
        gpu_s=20,
    ),
    _eager(
        "sleep and wake",
        ("sleep", "cold"),
        arguments={"enable_sleep_mode": True},
        cpu_s=None,
        gpu_s=15,
        absent="sleep mode needs a GPU",
    ),
    _eager("bf16, tiny llama", SHORT, dtype="bfloat16", gpu_s=None, absent="every GPU row is bf16"),
    _eager(
        "bf16, SmolLM2",
        ("cold", "repeat", "pair", "warm"),
        model="smollm2",
        dtype="bfloat16",
        cpu_s=40,
        gpu_s=None,
        absent="every GPU row is bf16",
    ),
    _eager(
        "programs, bf16",
        ("programs", "mixed"),
        dtype="bfloat16",
        gpu_s=None,
        absent="every GPU row is bf16",
    ),
    _eager("GPTQ weights", SHORT, model="llama-gptq", refusal="may", dtype="bfloat16"),
    _eager("AWQ weights", SHORT, model="llama-awq", refusal="may", dtype="bfloat16"),
    _eager(
        "fp8 weights, channelwise",
        SHORT,
        model="llama-fp8",
        refusal="may",
        dtype="bfloat16",
    ),
    _eager(
        "fp8 weights and activations",
        SHORT,
        arguments={"quantization": "fp8"},
        cpu_s=None,
        gpu_s=None,
        absent="no oracle: transformers does not round activations as vLLM's fp8 kernels do",
    ),
    # Refused before anything is loaded, but for the last three.
    _refused("KV connector", kv_transfer_config={"kv_connector": "X"}),
    _refused("KV offloading", kv_offloading_size=1.0),
    _refused("speculative decoding", speculative_config={"method": "ngram"}),
    _refused("context parallel", decode_context_parallel_size=2),
    _refused("data parallel", data_parallel_size=2),
    _refused("dual-batch overlap", enable_dbo=True),
    _refused("fp8 KV cache", starts=True, kv_cache_dtype="fp8"),
    _refused("MLA", "deepseek_v2", starts=True),
    _refused("ALiBi", "bloom", starts=True),
    # The other runner, each in a process of its own.
    Scenario(
        "V1 runner, compiled",
        conditions=("cold", "repeat", "warm", "mixed", "all-heads", "last-chunk-of-one-token"),
        arguments={"max_num_batched_tokens": 256},
        environment=V1,
        cpu_s=None,
        gpu_s=40,
        absent="V1 is what vLLM chooses on this CPU",
    ),
    _graphs("FULL_AND_PIECEWISE", "V1 runner", V1),
    _programs("V1 runner", V1),
    _eager(
        "V1 runner, chunks of 64",
        (*CHUNKED, "mixed"),
        arguments={"max_num_batched_tokens": 64},
        environment=V1,
        cpu_s=None,
        gpu_s=10,
        absent="V1 is what vLLM chooses on this CPU",
    ),
    _eager(
        "V2 runner, Triton interpreted",
        ("short",),
        arguments={"max_num_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 256},
        environment=V2,
        cpu_s=120,
        gpu_s=None,
        absent="V2 is what vLLM chooses on a GPU",
    ),
    # Several workers.
    _eager(
        "tensor parallel 2",
        ("cold", "repeat", "pair", "warm", "mixed", "head-sets", "all-heads"),
        arguments={"tensor_parallel_size": 2, "max_num_batched_tokens": 256},
        gpus=2,
        in_process=False,
        cpu_s=60,
        gpu_s=60,
    ),
    *(
        _eager(
            f"tensor parallel {size}",
            ("cold", "repeat", "pair", "warm", "mixed", "head-sets", "all-heads"),
            model="llama_8",
            arguments={"tensor_parallel_size": size, "max_num_batched_tokens": 256},
            gpus=size,
            in_process=False,
            cpu_s=60 * size,
            gpu_s=60,
        )
        for size in (4, 8)
    ),
    Scenario(
        "pipeline parallel 2, compiled",
        conditions=("cold", "repeat", "pair", "warm", "mixed", "head-sets", "all-heads"),
        arguments={"pipeline_parallel_size": 2, "max_num_batched_tokens": 256},
        gpus=2,
        in_process=False,
        cpu_s=80,
        gpu_s=70,
    ),
)
