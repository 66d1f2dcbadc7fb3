"""The engines of a GPU benchmark: hooked and unhooked, with and without their last layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .worker_side import EXTENSION

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM
    from hook_runtime.specs import CaptureRequest, Head

GPU_SHARE = 0.42
"""Of the GPU's memory for each engine: two of them run side by side."""
CPU_CACHE_BYTES = 256 << 20
CPU_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Engines:
    """How to start engines on one model.

    Attributes:
        model: folder with a config and a tokenizer; weights too unless ``load_format`` is "dummy".
        heads: what the hooked engines hold; "early exit" keeps the layers up to the last of them.
        arguments: of ``vllm.LLM``, for all engines.
    """

    model: Path
    heads: tuple[Head, ...]
    arguments: dict[str, Any]

    @property
    def config(self) -> Any:
        """The model's Hugging Face config, all layers counted."""
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model)

    @property
    def exit_layers(self) -> int:
        """Layers that an early exit keeps."""
        return min(self.config.num_hidden_layers, 1 + max(head.layer for head in self.heads))

    @contextmanager
    def hooked(self, *, early_exit: bool, **more: Any) -> Iterator[HookLLM]:
        """A HookLLM with all layers or with the early exit's."""
        from hook_runtime.engine import HookLLM

        arguments = {**self.arguments, "worker_extension_cls": EXTENSION, **more}
        layers = "auto" if early_exit else None
        with HookLLM(str(self.model), heads=self.heads, layers=layers, **arguments) as engine:
            yield engine

    @contextmanager
    def unhooked(self, *, early_exit: bool, **more: Any) -> Iterator[Any]:
        """A plain ``vllm.LLM`` of as many layers; cut ones get random weights."""
        arguments = {**self.arguments, "worker_extension_cls": EXTENSION, **more}
        if early_exit and self.exit_layers < self.config.num_hidden_layers:
            from hook_runtime.loader import first_layers

            arguments["hf_overrides"] = first_layers(self.config, self.exit_layers)
            arguments["load_format"] = "dummy"
        with plain_llm(str(self.model), **arguments) as engine:
            yield engine


@contextmanager
def plain_llm(model: str, **arguments: Any) -> Iterator[Any]:
    """A ``vllm.LLM`` that is stopped at the end."""
    from vllm import LLM

    engine = LLM(model, **arguments)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()


def engine_arguments(
    max_model_len: int, load_format: str, gpu_share: float | None = None
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` that all engines of a run share."""
    from hook_runtime.compat import is_cpu

    memory: dict[str, Any] = {"gpu_memory_utilization": gpu_share or GPU_SHARE}
    if is_cpu():
        memory = {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "block_size": CPU_BLOCK_SIZE}
    return {"max_model_len": max_model_len, "load_format": load_format, **memory}


def prefill(llm: Any, requests: Sequence[CaptureRequest]) -> None:
    """The same prompts as a capture's, as ordinary requests in one ``generate``.

    Their salt keeps them from the blocks of captures, as captures' salts do.
    """
    from vllm import SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
    llm.generate([plain_prompt(request) for request in requests], one, use_tqdm=False)


def plain_prompt(request: CaptureRequest) -> dict[str, Any]:
    """vLLM's prompt of an ordinary request."""
    return {"prompt_token_ids": list(request.prompt_token_ids), "cache_salt": "plain"}


def computed_spans(
    pairs: Sequence[Sequence[CaptureRequest]], block_size: int
) -> list[tuple[int, int]]:
    """Positions that each prompt computes, when every pair shares its beginning's whole blocks."""
    spans = []
    for first, second in pairs:
        a, b = first.prompt_token_ids, second.prompt_token_ids
        common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b) - 1)
        spans += [(0, len(a)), (common // block_size * block_size, len(b))]
    return spans
