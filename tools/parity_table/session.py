"""What a condition works on (`Session`) and what it hands back (`Observed`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompts import HEADS, QUERIES, capture_request

from hook_runtime.specs import Capture, CaptureRequest, Head

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM


class NotMet(Exception):
    """The condition did not arise, so that its row would say nothing."""


@dataclass(frozen=True, slots=True)
class Part:
    """One captured request, and the folder of the model whose attention it must show."""

    model: Path
    request: CaptureRequest
    capture: Capture


@dataclass(slots=True)
class Observed:
    """What one condition saw: captures to compare, faults found on the way, and remarks."""

    parts: list[Part] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Session:
    """A running engine, with short ways to the prompts that every condition needs."""

    engine: HookLLM
    model: Path
    device: str
    dtype: str
    adapters: tuple[tuple[str, Path, Path], ...] = ()
    """Name, adapter's folder and merged model's folder of every LoRA adapter."""

    @property
    def config(self) -> Any:
        return self.engine.llm.llm_engine.vllm_config

    @property
    def chunk(self) -> int:
        """The most tokens the scheduler puts into one step."""
        return int(self.config.scheduler_config.max_num_batched_tokens)

    @property
    def caches_prefixes(self) -> bool:
        return bool(self.config.cache_config.enable_prefix_caching)

    @property
    def heads(self) -> tuple[Head, ...]:
        """A few heads, in an order that is not the model's."""
        info = self.engine.model
        if info.num_layers > 20:
            return HEADS
        last, middle = info.num_heads - 1, info.num_heads // 2
        return Head(3, last), Head(0, 0), Head(2, 1), Head(1, middle), Head(0, 1)

    def product(self, query: str = QUERIES[0], **how: Any) -> CaptureRequest:
        """A prompt in the product's layout; ``how`` goes to `prompts.capture_request`."""
        how.setdefault("heads", self.heads)
        return capture_request(self.engine.tokenizer, query, **how)

    def products(self, *queries: str, **how: Any) -> list[CaptureRequest]:
        return [self.product(query, **how) for query in queries]

    def cold(self) -> None:
        """Empty the prefix cache, which waits for the blocks of the last step to come free."""
        for _ in range(20):
            if self.engine.llm.reset_prefix_cache():
                return
            time.sleep(0.05)
        raise NotMet("the prefix cache could not be emptied")

    def capture(self, seen: Observed, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """Capture in one batch; every capture goes to ``seen``."""
        captures = self.engine.capture(requests)
        self.keep(seen, requests, captures)
        return captures

    def keep(
        self,
        seen: Observed,
        requests: Sequence[CaptureRequest],
        captures: Sequence[Capture | None],
        model: Path | None = None,
    ) -> None:
        """Note captures to be compared with ``model``, by default the engine's own."""
        for place, (request, capture) in enumerate(zip(requests, captures, strict=True)):
            if capture is None:
                seen.problems.append(f"request {place} has no capture")
            else:
                seen.parts.append(Part(model or self.model, request, capture))


def greedy(tokens: int, **more: Any) -> Any:
    """Sampling parameters of a request that generates without chance."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, temperature=0.0, **more)


def as_prompt(request: CaptureRequest) -> dict[str, Any]:
    """The request's prompt as vLLM takes it."""
    return {"prompt_token_ids": list(request.prompt_token_ids)}
