"""What the engine's side knows of its workers: the heads held, cache salts, and limits.

Shared by the synchronous and the asynchronous engine; talks to nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import compat, memory
from .errors import (
    EngineDeadError,
    IncompleteCaptureError,
    ProbeError,
    ShadowMemoryError,
    UnsupportedModelError,
)
from .exchange import with_probe
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo


@dataclass(frozen=True, slots=True)
class Submission:
    """A probed request as vLLM takes it, under the id by which its capture is fetched."""

    capture_id: str
    request: CaptureRequest
    prompt: dict[str, Any]
    params: Any
    generation: int


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

    def check(self, request: CaptureRequest) -> None:
        """Raise ProbeError for a head that does not exist or a prompt that does not fit."""
        probe, size = request.probe, len(request.prompt_token_ids)
        if size >= self.model.max_model_len:
            raise ProbeError(
                f"the prompt has {size} tokens; this engine takes at most "
                f"{self.model.max_model_len - 1} (max_model_len less one generated token)."
            )
        if probe.heads != "all":
            self.model.check_heads(probe.heads)
        elif size > self.max_num_batched_tokens:
            raise ProbeError(
                f"a probe of all heads needs its prompt in one prefill chunk: {size} tokens do not "
                f"fit max_num_batched_tokens={self.max_num_batched_tokens}; raise it, or name the "
                "heads."
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

    def submission(
        self, request: CaptureRequest, params: Any, *, fresh: bool = False
    ) -> Submission:
        """Captures have a prefix cache of their own, in which every block has been captured.

        ``fresh`` keeps the request to a cache of its own, so that all of it is computed.
        """
        capture_id = str(next(self._ids))
        everything = request.probe.heads == "all"
        salt = "hook_runtime/all" if everything else f"hook_runtime/{self._generation}"
        prompt = {
            "prompt_token_ids": list(request.prompt_token_ids),
            "cache_salt": f"{salt}/{capture_id}" if fresh else salt,
        }
        carried = with_probe(params, capture_id, request.probe)
        return Submission(capture_id, request, prompt, carried, self._generation)

    def capture(
        self, request: CaptureRequest, result: dict[str, Any], output: Any, redone: bool
    ) -> Capture:
        """The merged result as a capture; IncompleteCaptureError where it is none."""
        if "error" in result:
            raise ProbeError(result["error"])
        if request.probe.heads == "all" and len(result.get("heads", ())) != self.every_head:
            result.setdefault("incomplete", "a worker holds no result for the request")
            result.pop("values", None)
        if "values" not in result:
            raise IncompleteCaptureError(
                f"the capture stayed incomplete after the request was computed again: "
                f"{result.get('incomplete', 'no worker returned it')}."
            )
        return Capture(
            heads=result["heads"],
            values=result["values"],
            cached_tokens=0 if redone else int(output.num_cached_tokens or 0),
            recomputed=redone,
        )


def shadow_arguments(heads: Iterable[Head], anyway: bool = False) -> tuple[list[list[int]], float]:
    """What ``hook_runtime_shadow`` takes; ``anyway`` where the memory was set aside before."""
    return [list(h) for h in sorted(heads)], math.inf if anyway else memory.MARGIN


def probed_request(prompt: Any, probe: AttentionProbe, tokenizer: Any) -> CaptureRequest:
    """A prompt of text or token ids, with its probe."""
    if isinstance(prompt, str):
        return CaptureRequest(tuple(tokenizer(prompt)["input_ids"]), probe)
    if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
        others = sorted(set(prompt) - {"prompt_token_ids", "prompt"})
        if others:
            raise ProbeError(
                f"a probed prompt holds token ids only, but this one has {', '.join(others)}."
            )
        return CaptureRequest(tuple(prompt["prompt_token_ids"]), probe)
    if isinstance(prompt, Sequence) and all(isinstance(t, int) for t in prompt):
        return CaptureRequest(tuple(prompt), probe)
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
