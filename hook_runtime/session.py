"""What the engine's side knows of its workers: the heads held, cache salts, and limits.

Shared by the synchronous and the asynchronous engine; talks to nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import compat, memory
from .conductor import Run, with_program, with_salt
from .errors import (
    EngineDeadError,
    IncompleteCaptureError,
    ProbeError,
    ShadowMemoryError,
    UnsupportedModelError,
    UnsupportedVLLMError,
)
from .exchange import with_probe
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo


class Ask(NamedTuple):
    """A probed request, vLLM's ``SamplingParams`` for it, its ``LoRARequest`` or None, the run of a
    program or None, and further arguments of the engine's ``generate`` or None."""

    request: CaptureRequest
    params: Any
    adapter: Any = None
    run: Run | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Submission:
    """A probed request as vLLM takes it, under the id by which its capture is fetched."""

    capture_id: str
    request: CaptureRequest
    prompt: dict[str, Any]
    params: Any
    adapter: Any
    generation: int
    options: Mapping[str, Any]


class Session:
    """One per engine.

    Attributes:
        model: what runs.
        held: the heads that the workers hold.
        shadow_bytes: what they take there.
        every_head: how many heads a probe of all heads must come back with.
    """

    def __init__(
        self,
        model: ModelInfo,
        vllm_config: Any,
        installed: Sequence[Mapping[str, Any]],
        engines: int = 1,
    ) -> None:
        """``installed``: the answers to the installation of all workers of so many engines."""
        self.model = model
        self.every_head = sum(sum(rank["heads"]) for rank in installed) // engines
        self.held: frozenset[Head] = frozenset()
        self.shadow_bytes = 0
        self.max_num_batched_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_num_seqs: int = vllm_config.scheduler_config.max_num_seqs
        self._max_chunk: int = (
            getattr(vllm_config.scheduler_config, "long_prefill_token_threshold", 0)
            or self.max_num_batched_tokens
        )
        self._takes_adapters = vllm_config.lora_config is not None
        self._ids = itertools.count()
        self._generation = 0

    # ------------------------------------------------------------ checks

    def check_whole(self) -> None:
        """Raise UnsupportedModelError on an engine with layers cut off: it cannot generate."""
        if self.model.layers_kept < self.model.num_layers:
            raise UnsupportedModelError(
                f"this engine keeps {self.model.layers_kept} of {self.model.num_layers} layers "
                "and can only capture; create it with layers=None to generate text."
            )

    def check(self, request: CaptureRequest, adapter: Any = None) -> None:
        """Raise ProbeError for a head that does not exist, a prompt that does not fit, or an
        adapter that the engine does not take."""
        probe, size = request.probe, len(request.prompt_token_ids)
        if adapter is not None and not self._takes_adapters:
            raise ProbeError(
                f"lora_request={adapter.lora_name!r} was given, but this engine takes no adapters: "
                "start it with enable_lora=True."
            )
        if size >= self.model.max_model_len:
            raise ProbeError(
                f"the prompt has {size} tokens; this engine takes at most "
                f"{self.model.max_model_len - 1} (max_model_len less one generated token)."
            )
        if probe.heads != "all":
            self.model.check_heads(probe.heads)
            return
        limits = {
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "long_prefill_token_threshold": self._max_chunk,
        }
        for setting, limit in limits.items():
            if size > limit:
                raise ProbeError(
                    f"a probe of all heads needs its prompt in one prefill chunk: {size} tokens do "
                    f"not fit {setting}={limit}; raise it, or name the heads."
                )

    def check_mixture(self, adapters: Sequence[Any]) -> None:
        """Raise UnsupportedVLLMError for what vLLM would compute with a wrong adapter.

        On a CPU vLLM (0.32) gives a request without an adapter another one's of its batch.
        """
        if self.model.device == "cpu" and None in adapters and any(a is not None for a in adapters):
            raise UnsupportedVLLMError(
                f"{len(adapters)} prompts, some with a lora_request and some without: on a CPU "
                "vLLM computes the latter with the adapter of another. Give those without an "
                "adapter in a call of their own."
            )

    def check_apart(self, adapter: Any) -> None:
        """As ``check_mixture``, where nobody knows what else will be in the batch."""
        if self.model.device == "cpu" and self._takes_adapters and adapter is None:
            raise UnsupportedVLLMError(
                "a capture without a lora_request on an engine with enable_lora=True: on a CPU "
                "vLLM computes it with the adapter of another request of its batch. Use HookLLM "
                "(backend 'vllm'), whose calls take turns, or an engine without enable_lora."
            )

    # ------------------------------------------------------------ heads held

    def to_hold(self, requests: Iterable[CaptureRequest]) -> frozenset[Head] | None:
        """The heads to hold for these requests, or None where the workers hold them already."""
        wanted = {h for r in requests if r.probe.heads != "all" for h in r.probe.heads}
        return None if wanted <= self.held else self.held | wanted

    def refused(
        self, heads: frozenset[Head], workers: Sequence[Mapping[str, int]]
    ) -> ShadowMemoryError | None:
        """The error that a worker's answer to holding these heads stands for, if any."""
        for worker in workers:
            if "needed" in worker:
                needed, free = map(memory.readable, (worker["needed"], worker["free"]))
                return ShadowMemoryError(
                    f"holding {len(heads)} heads takes {needed} on a worker that has {free} free. "
                    "Name all heads when the engine starts, so that the KV cache leaves room for "
                    "them, or give it less (gpu_memory_utilization, kv_cache_memory_bytes), or "
                    "use fewer heads."
                )
        return None

    def now_holds(self, heads: frozenset[Head], workers: Sequence[Mapping[str, int]]) -> None:
        """The workers hold these heads from now on, and nothing that was captured before."""
        self.held = heads
        self.shadow_bytes = sum(worker["bytes"] for worker in workers)
        self._generation += 1

    def leave_cache(self, submission: Submission) -> None:
        """The prefix cache that this request found holds what nobody captured: use another."""
        if submission.generation == self._generation:
            self._generation += 1

    def let_go(self) -> None:
        """Nobody knows what the workers hold: the next capture has it made anew."""
        self.held = frozenset()
        self._generation += 1

    # ------------------------------------------------------------ there and back

    @property
    def salt(self) -> str:
        """Cache salt of the captures of named heads, without an adapter, that are made now."""
        return f"hook_runtime/{self._generation}"

    def submission(self, ask: Ask, *, fresh: bool = False) -> Submission:
        """Captures have a prefix cache of their own, in which every block has been captured.

        ``fresh`` keeps the request to a cache of its own, so that all of it is computed.
        """
        request, params, adapter, run, options = ask
        capture_id = str(next(self._ids))
        everything = request.probe.heads == "all"
        salt = "hook_runtime/all" if everything else self.salt
        if adapter is not None:  # vLLM tells adapters apart by name and path, workers by number
            salt = f"{salt}/adapter {adapter.lora_int_id}"
        prompt = {
            "prompt_token_ids": list(request.prompt_token_ids),
            "cache_salt": f"{salt}/{capture_id}" if fresh else salt,
        }
        carried = with_probe(params, capture_id, request.probe)
        if run is not None:
            prompt, carried = with_salt(prompt, run), with_program(carried, run)
        return Submission(
            capture_id, request, prompt, carried, adapter, self._generation, options or {}
        )

    def capture(
        self, request: CaptureRequest, result: dict[str, Any], output: Any, tries: int
    ) -> Capture:
        """The merged result as a capture; IncompleteCaptureError where it is none.

        ``tries``: how many times the request was computed.
        """
        if "error" in result:
            raise ProbeError(result["error"])
        if request.probe.heads == "all" and len(result.get("heads", ())) != self.every_head:
            found = len(result.get("heads", ()))
            result.setdefault(
                "incomplete", f"the workers returned {found} of the model's {self.every_head} heads"
            )
            result.pop("values", None)
        if "values" not in result:
            raise IncompleteCaptureError(self._incomplete(request, result, tries))
        return Capture(
            heads=result["heads"],
            values=result["values"],
            cached_tokens=0 if tries > 1 else int(output.num_cached_tokens or 0),
            recomputed=tries > 1,
        )

    def _incomplete(self, request: CaptureRequest, result: dict[str, Any], tries: int) -> str:
        heads, size = request.probe.heads, len(request.prompt_token_ids)
        what = "every head" if heads == "all" else f"{len(heads)} heads"
        reason = result["incomplete"]
        if heads == "all":
            needed, now = size + self.max_num_seqs, self.max_num_batched_tokens
            larger = (
                f"max_num_batched_tokens={needed} or more (now {now}), " if now < needed else ""
            )
            fix = (
                f"Give the prompt room for a prefill step of its own: {larger}a larger KV cache "
                "(kv_cache_memory_bytes, gpu_memory_utilization), or HookLLM (backend 'vllm') "
                "instead of AsyncHookLLM; or name the heads."
            )
        else:
            fix = (
                "If other callers ask for other heads meanwhile, name all of them when the engine "
                "starts (heads=...); else the engine's log above may say more."
            )
        return (
            f"the capture of {what} for a prompt of {size} tokens stayed incomplete after it was "
            f"computed {tries} times: {reason}. {fix}"
        )


def shadow_arguments(heads: Iterable[Head], anyway: bool = False) -> tuple[list[list[int]], float]:
    """What ``hook_runtime_shadow`` takes; ``anyway`` where the memory was set aside before."""
    return [list(h) for h in sorted(heads)], math.inf if anyway else memory.MARGIN


def probed_request(prompt: Any, probe: AttentionProbe, tokenizer: Any) -> CaptureRequest:
    """A prompt of text or token ids, with its probe."""
    return CaptureRequest(token_ids(prompt, tokenizer), probe)


def token_ids(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    """Of a prompt that is text or token ids; ProbeError for any other."""
    if isinstance(prompt, str):
        return tuple(tokenizer(prompt)["input_ids"])
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        others = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
        if others:
            raise ProbeError(
                f"a probed prompt holds token ids only, but this one has {', '.join(others)}."
            )
        return tuple(prompt["prompt_token_ids"])
    if isinstance(prompt, Sequence) and all(isinstance(t, int) for t in prompt):
        return tuple(prompt)
    raise ProbeError(f"a probed prompt must be text or token ids, not {type(prompt).__name__}.")


@contextlib.contextmanager
def engine_alive() -> Iterator[None]:
    """Turn vLLM's "the engine process died" into ours."""
    try:
        yield
    except compat.engine_died() as error:
        raise EngineDeadError(
            "vLLM's engine process died, and what it was doing is lost; its log above says why. "
            "Close this engine and start a new one."
        ) from error
