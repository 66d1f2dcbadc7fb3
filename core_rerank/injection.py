"""InjectionDetector: tells by a model's own attention whether data tries to give it orders."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

from .backends import name_model, open_backend
from .errors import ClosedError, HeadSetError
from .injection_heads import InjectionHeads, find_injection_heads
from .injection_prompt import (
    GuardedPrompt,
    GuardedPromptBuilder,
    guarded_request,
    instruction_and_data,
)
from .injection_scoring import focus, suspicion, threshold_for

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Detection:
    """What was found in one piece of data.

    Attributes:
        score: in [0, 1]; HIGHER is more suspicious (one minus the focus score of Attention
            Tracker, arXiv 2411.00348, or the weighted form of it: see `injection_scoring`).
        flagged: the score lies above ``threshold``. Data without tokens is never flagged.
        threshold: in use.
        focus_by_head: each head's share of attention that stays on the instruction, in [0, 1];
            lower is more suspicious.
    """

    score: float
    flagged: bool
    threshold: float
    focus_by_head: Mapping[Head, float]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-safe copy; heads are written ``"15-7"``."""
        return {
            "score": self.score,
            "flagged": self.flagged,
            "threshold": self.threshold,
            "focus_by_head": {str(head): value for head, value in self.focus_by_head.items()},
        }


@dataclass(frozen=True, slots=True)
class Guarded:
    """A guarded generation: ``output`` is vLLM's RequestOutput, None where it was flagged."""

    detection: Detection
    output: Any | None

    @property
    def text(self) -> str | None:
        """The generated text; None where the data was flagged."""
        return None if self.output is None else self.output.outputs[0].text


@runtime_checkable
class _Generates(Protocol):
    """A backend that generates with a probe on the prefill: HookLLM."""

    def probe(self, prompts: Any, probes: Any, sampling_params: Any = None) -> Any: ...


class InjectionDetector:
    """Scores untrusted data by how far it draws attention away from the trusted instruction.

    Calls may come from several threads. Close it, or use it as a context manager, to free a model
    that it loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | CaptureBackend = DEFAULT_MODEL,
        config: InjectionHeads | str | os.PathLike[str] | None = None,
        *,
        threshold: float | None = None,
        backend: str = "vllm",
        **engine: Any,
    ) -> None:
        """Load ``model``, or take one that runs, and its heads.

        Args:
            model: an alias, a Hugging Face id or a local folder; or a running `CaptureBackend` such
                as `hook_runtime.HookLLM`, which stays open when the detector is closed.
            config: heads, or the path of their YAML; by default the packaged ones of the model.
            threshold: instead of the config's.
            backend: "vllm", "vllm-async" or "transformers", for a model that is to be loaded.
            **engine: passed to it, as in `Reranker`. All layers are loaded, so that the model can
                generate; ``layers="auto"`` loads and runs only those that scoring needs.

        Raises:
            ModelError, HeadSetError: no such model; no heads for it, or another model's or task's.
            PromptError: the model's chat template cannot hold an instruction and data.
            ValueError: a threshold outside [0, 1].
        """
        running = model if isinstance(model, CaptureBackend) else None
        where = backend if running is None else running
        resolved = name_model(DEFAULT_MODEL if isinstance(model, CaptureBackend) else model, where)
        if isinstance(config, str | os.PathLike):
            config = InjectionHeads.from_yaml(config)
        self._heads = config or _packaged(resolved.model_id)
        self._threshold = _checked_threshold(self._heads, threshold)
        self._heads.head_set.check_model_id(resolved.model_id)
        self._closed = False
        engine = {"layers": None, **engine} if running is None else engine
        self._open = open_backend(where, resolved, self._heads.heads, engine)
        try:
            self._heads.check(self._open.model, self._open.model_id, "instruction")
            self._builder = GuardedPromptBuilder(
                self._open.backend.tokenizer, self._open.model.max_model_len
            )
        except BaseException:
            self.close()
            raise

    @property
    def backend(self) -> CaptureBackend:
        """What attention is read from."""
        return self._open.backend

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._open.model

    @property
    def config(self) -> InjectionHeads:
        """The heads in use."""
        return self._heads

    @property
    def threshold(self) -> float:
        """A score above it is flagged."""
        return self._threshold

    def score(self, instruction: str, data: str) -> Detection:
        """Whether ``data``, read under the trusted ``instruction``, looks like an attack.

        Raises:
            TypeError: one of them is no string.
            PromptError: a blank instruction, or both do not fit the model; nothing is ever cut.
            NotFiniteError: the engine returned NaN. It is never taken for an attack.
            ClosedError: after ``close()``.
        """
        return self.score_many([(instruction, data)])[0]

    def score_many(
        self,
        pairs: Iterable[tuple[str, str]],
        *,
        threshold: float | None = None,
        progress: bool = False,
    ) -> list[Detection]:
        """``score`` of each (instruction, data), all in one engine batch, in their order.

        ``threshold`` is instead of the detector's own; errors carry a note with the item's number.
        """
        threshold = self._threshold_of_call(threshold)
        prompts = self._prompts(pairs)
        requests = [self._request(prompt) for prompt in prompts]
        captures = self._open.capture(requests, progress=progress)
        return self._detections(prompts, captures, threshold)

    def calibrate(
        self, benign: Iterable[tuple[str, str]], fpr: float = 0.01, *, progress: bool = False
    ) -> InjectionHeads:
        """The heads in use with the lowest threshold that flags at most ``fpr`` of ``benign``.

        Give (instruction, data) pairs as your program has them, at least ``1 / fpr``: of fewer,
        none is flagged, and nothing is known of the rate. The detector itself stays as it is: make
        another with what is returned, or save it with ``to_yaml``.

        Raises:
            ValueError: no pairs, or ``fpr`` is not within [0, 1).
        """
        import numpy as np

        scores = [found.score for found in self.score_many(benign, progress=progress)]
        threshold = threshold_for(np.array(scores), fpr)
        about = {"fpr": f"{fpr:g}", "threshold_on": "given pairs", "benign_texts": str(len(scores))}
        found_with = {**self._heads.found_with, **about}
        return self._heads.model_copy(update={"threshold": threshold, "found_with": found_with})

    async def ascore(self, instruction: str, data: str) -> Detection:
        """As ``score``, leaving the event loop free; with "vllm-async", calls share batches."""
        return (await self.ascore_many([(instruction, data)]))[0]

    async def ascore_many(
        self, pairs: Iterable[tuple[str, str]], *, threshold: float | None = None
    ) -> list[Detection]:
        """As ``score_many``, leaving the event loop free as ``ascore`` does."""
        threshold = self._threshold_of_call(threshold)
        prompts = await asyncio.to_thread(self._prompts, pairs)
        requests = [self._request(prompt) for prompt in prompts]
        return self._detections(prompts, await self._open.acapture(requests), threshold)

    def generate(self, instruction: str, data: str, sampling_params: Any = None) -> Guarded:
        """Answer, unless ``data`` is flagged: then nothing is generated beyond the prefill.

        See ``generate_many``.
        """
        return self.generate_many([(instruction, data)], sampling_params)[0]

    def generate_many(
        self, pairs: Iterable[tuple[str, str]], sampling_params: Any = None
    ) -> list[Guarded]:
        """``score_many``, then generation for the pairs that were not flagged.

        The prompt is computed once: the prefill that was read stays in vLLM's prefix cache (on by
        default), and the generation goes on from it, recomputing at most one cache block and a
        token. For a flagged pair the engine stops after the prefill; the one token that vLLM
        samples with it is thrown away.

        Args:
            pairs: (instruction, data) each.
            sampling_params: vLLM's, with n=1; by default the model's own.

        Raises:
            TypeError: the backend does not generate (only `HookLLM` does).
        """
        backend = self._open.backend
        if not isinstance(backend, _Generates):
            raise TypeError(
                f"the {self.model.backend} backend does not generate: make the detector on a "
                "hook_runtime.HookLLM, or with backend='vllm'."
            )
        pairs = list(pairs)
        prompts = self._prompts(pairs)
        requests = [self._request(prompt) for prompt in prompts]
        captures = self._open.capture(requests)
        detections = self._detections(prompts, captures, self._threshold)
        clean = [i for i, detection in enumerate(detections) if not detection.flagged]
        outputs: dict[int, Any] = {}
        if clean:
            # The probe comes along because probed requests share a prefix cache of their own.
            probed = backend.probe(
                [{"prompt_token_ids": list(requests[i].prompt_token_ids)} for i in clean],
                [requests[i].probe for i in clean],
                sampling_params,
            )
            outputs = dict(zip(clean, probed.outputs, strict=True))
        return [Guarded(detection, outputs.get(i)) for i, detection in enumerate(detections)]

    def close(self) -> None:
        """Free the model, unless it was given running; further calls raise. May be repeated."""
        if not self._closed:
            self._closed = True
            self._open.close()

    def __enter__(self) -> InjectionDetector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prompts(self, pairs: Iterable[tuple[str, str]]) -> list[GuardedPrompt]:
        if self._closed:
            raise ClosedError(f"this InjectionDetector for {self.model.name} was closed.")
        prompts = []
        for number, pair in enumerate(pairs):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"item {number} is no (instruction, data) pair: {pair!r:.80}.")
            try:
                prompts.append(self._builder.build(*pair))
            except (TypeError, ValueError) as error:
                error.add_note(f"in item {number}")
                raise
        return prompts

    def _threshold_of_call(self, threshold: float | None) -> float:
        return self._threshold if threshold is None else _checked_threshold(self._heads, threshold)

    def _request(self, prompt: GuardedPrompt) -> CaptureRequest:
        return guarded_request(prompt, self._heads.heads)

    def _detections(
        self, prompts: Sequence[GuardedPrompt], captures: Sequence[Capture], threshold: float
    ) -> list[Detection]:
        return [self._detection(p, c, threshold) for p, c in zip(prompts, captures, strict=True)]

    def _detection(self, prompt: GuardedPrompt, capture: Capture, threshold: float) -> Detection:
        heads = self._heads
        shares = focus(instruction_and_data(prompt, capture))
        score = float(suspicion(shares, heads.weights, heads.intercept))
        return Detection(
            score=score,
            flagged=prompt.data_tokens > 0 and score > threshold,
            threshold=threshold,
            focus_by_head=dict(zip(heads.heads, map(float, shares), strict=True)),
        )


def _packaged(model_id: str) -> InjectionHeads:
    found = find_injection_heads(model_id, "instruction")
    if found is None:
        raise HeadSetError(
            f"no injection heads are known for {model_id}. Find some with `core-rerank "
            "detect-heads --task injection`, and give their file as config."
        )
    return found


def _checked_threshold(heads: InjectionHeads, threshold: float | None) -> float:
    if threshold is None:
        return heads.threshold
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise TypeError(f"threshold must be a number, not {threshold!r}.")
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold must lie within [0, 1], not {threshold!r}.")
    return float(threshold)
