"""HookLLM: vLLM's LLM with attention probes, in this process's terms: requests in, captures out."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import compat
from .errors import (
    ClosedError,
    IncompleteCaptureError,
    ProbeError,
    UnsupportedModelError,
    UnsupportedVLLMError,
)
from .exchange import merge_ranks, one_token, per_prompt, with_probe
from .guard import refuse_unguarded_script
from .options import check_running, engine_options, model_info
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo

MAX_BATCH = 8192  # requests in one generate: bounds what the workers keep for one fetch
ERRORS = {e.__name__: e for e in (UnsupportedModelError, UnsupportedVLLMError)}


@dataclass(frozen=True, slots=True)
class Probed:
    """What `HookLLM.probe` returns: vLLM's outputs, and a capture where a prompt had a probe."""

    outputs: list[Any]
    captures: list[Capture | None]


class HookLLM:
    """vLLM's ``LLM`` with an attention probe on any request.

    Args:
        model: Hugging Face id or local folder.
        heads: heads to hold from the start; others asked for later are added then, which empties
            the captured prefix cache. None waits for the first capture.
        layers: None loads the whole model; ``"auto"`` loads and runs only the layers up to the
            last of ``heads``; a number keeps that many. A cut engine captures but cannot generate.
        name: the model's name in `ModelInfo`; defaults to ``model``.
        **engine: any argument of ``vllm.LLM``. Defaults are vLLM's, except on a CPU, where
            ``kv_cache_memory_bytes`` is bounded and ``block_size`` is 32 (see `options`).

    Raises:
        UnsupportedVLLMError: vLLM is missing, lacks a needed symbol, or runs in a mode ruled out.
        UnsupportedModelError: the model's attention cannot be captured exactly; with the reason.
        ProbeError: a head does not exist or lies beyond the layers kept.

    Calls may come from several threads; they take turns.
    """

    def __init__(
        self,
        model: str,
        *,
        heads: Iterable[Any] | None = None,
        layers: int | Literal["auto"] | None = None,
        name: str | None = None,
        **engine: Any,
    ) -> None:
        compat.check_version()
        refuse_unguarded_script()
        chosen = tuple(Head.parse(h) for h in heads) if heads is not None else ()
        options = engine_options(model, chosen, layers, engine)
        self._lock = threading.RLock()
        self._closed = False
        self._ids = itertools.count()
        self._generation = 0
        self._leftover: list[str] = []  # captures of interrupted batches, to be dropped
        self._held: frozenset[Head] = frozenset()
        self.shadow_bytes = 0
        self.llm = compat.symbol("vllm", "LLM")(model=model, **options.engine)
        try:
            check_running(self.llm.llm_engine.vllm_config)
            installed = self._install()
            self._model = model_info(self.llm, name or model, options, installed)
            self.kv_bytes = sum(r["kv_bytes"] for r in installed)
            self.runner = str(installed[0]["runner"])
            self._model.check_heads(chosen)
            if chosen:
                self._hold(frozenset(chosen))
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ the public side

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        self._check_open()
        return self.llm.get_tokenizer()

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = False, **kwargs: Any
    ) -> list[Any]:
        """vLLM's ``LLM.generate``, unchanged; refused on an engine with layers cut off."""
        self._check_whole()
        with self._lock:
            self._check_open()
            with self._tidied_after_interrupt(()):
                return self.llm.generate(prompts, sampling_params, use_tqdm=use_tqdm, **kwargs)

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        """Run all requests as one engine batch; captures in request order.

        A request whose cached prefix had not been captured is computed again from scratch.

        Raises:
            ProbeError: a head does not exist, or a prompt does not fit the engine.
            IncompleteCaptureError: rows were missing even then; partial numbers never come back.
            ClosedError: after ``close()``.
        """
        requests = list(requests)
        params = [one_token() for _ in requests]
        with self._lock:
            self._check_open()
            for request in requests:
                self._check_request(request)
            self._ensure_held(requests)
            captures = self._run(requests, params, [], [], progress)[1]
        return captures

    def probe(
        self,
        prompts: Sequence[Any],
        probes: Sequence[AttentionProbe | None],
        sampling_params: Any = None,
        *,
        progress: bool = False,
    ) -> Probed:
        """Generate as usual and capture where ``probes[i]`` is not None, in one engine batch.

        Prompts are vLLM's; a probed one must be text or token ids. Sampling parameters are one for
        all or one a prompt; a probed request must ask for one completion (``n=1``).
        """
        self._check_whole()
        if len(prompts) != len(probes):
            raise ProbeError(f"{len(prompts)} prompts but {len(probes)} probes: give one a prompt.")
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        params = per_prompt(sampling_params, len(prompts))
        chosen = [i for i, p in enumerate(probes) if p is not None]
        ordinary = [i for i, p in enumerate(probes) if p is None]
        with self._lock:
            self._check_open()
            requests = [CaptureRequest(self._tokens(prompts[i]), probes[i]) for i in chosen]  # type: ignore[arg-type]
            for request in requests:
                self._check_request(request)
            self._ensure_held(requests)
            outputs, captures = self._run(
                requests,
                [params[i] for i in chosen],
                [prompts[i] for i in ordinary],
                [params[i] for i in ordinary],
                progress,
            )
        by_prompt: list[Capture | None] = [None] * len(prompts)
        for i, capture in zip(chosen, captures, strict=True):
            by_prompt[i] = capture
        ordered = dict(zip([*chosen, *ordinary], outputs, strict=True))
        return Probed([ordered[i] for i in range(len(prompts))], by_prompt)

    def close(self) -> None:
        """Stop the engine and free its memory; further calls raise ClosedError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm

    def __enter__(self) -> HookLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ one batch

    def _run(
        self,
        requests: list[CaptureRequest],
        params: list[Any],
        other_prompts: list[Any],
        other_params: list[Any],
        progress: bool,
    ) -> tuple[list[Any], list[Capture]]:
        """Probed requests first, then the ordinary ones; outputs in that order."""
        outputs: list[Any] = []
        results: list[dict[str, Any]] = []
        for group in self._groups(requests):
            members = [requests[i] for i in group]
            last = group.stop == len(requests)
            new_outputs, new_results = self._submit(
                members,
                [params[i] for i in group],
                other_prompts if last else [],
                other_params if last else [],
                progress,
            )
            outputs.extend(new_outputs)
            results.extend(new_results)
        again = [i for i, r in enumerate(results) if "incomplete" in r]
        if any(results[i].get("stale") for i in again):
            self._generation += 1  # this salt's cache holds what nobody captured: leave it for good
        for i in again:
            _, (results[i],) = self._submit([requests[i]], [one_token()], [], [], False, fresh=True)
        redone = set(again)
        captures = [
            self._capture(request, result, outputs[i], i in redone)
            for i, (request, result) in enumerate(zip(requests, results, strict=True))
        ]
        return outputs, captures

    def _groups(self, requests: list[CaptureRequest]) -> Iterable[range]:
        """Batches; where all heads are read, ones whose prompts fit one prefill step each."""
        if not any(r.probe.heads == "all" for r in requests):
            for start in range(0, max(1, len(requests)), MAX_BATCH):
                yield range(start, min(start + MAX_BATCH, len(requests)))
            return
        start, tokens = 0, 0
        scheduler = self.llm.llm_engine.vllm_config.scheduler_config
        for i, request in enumerate(requests):
            size = len(request.prompt_token_ids)
            full = tokens + size > scheduler.max_num_batched_tokens
            if i > start and (full or i - start == scheduler.max_num_seqs):
                yield range(start, i)
                start, tokens = i, 0
            tokens += size
        yield range(start, len(requests))

    def _submit(
        self,
        requests: list[CaptureRequest],
        params: list[Any],
        other_prompts: list[Any],
        other_params: list[Any],
        progress: bool,
        fresh: bool = False,
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """One ``generate`` and one fetch; ``fresh`` keeps each request to its own prefix cache."""
        ids = [f"{next(self._ids)}" for _ in requests]
        prompts = [
            {
                "prompt_token_ids": list(r.prompt_token_ids),
                "cache_salt": self._salt(r.probe) + (f"/{i}" if fresh else ""),
            }
            for i, r in zip(ids, requests, strict=True)
        ]
        carried = [with_probe(p, i, r.probe) for p, i, r in zip(params, ids, requests, strict=True)]
        with self._tidied_after_interrupt(ids):
            outputs = self.llm.generate(
                [*prompts, *other_prompts], [*carried, *other_params], use_tqdm=progress
            )
        return outputs, self._take(ids, requests)

    @contextlib.contextmanager
    def _tidied_after_interrupt(self, ids: Sequence[str]) -> Iterator[None]:
        """vLLM leaves an interrupted batch running, and would return it with the next one."""
        try:
            yield
        except BaseException as error:
            # Nothing here may wait for the engine: Ctrl-C in a terminal ends its processes too.
            self._leftover.extend(ids)
            engine = self.llm.llm_engine
            try:
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
            except Exception as second:
                error.add_note(f"the engine could not be tidied up after that: {second!r}")
            raise

    def _take(self, ids: list[str], requests: list[CaptureRequest]) -> list[dict[str, Any]]:
        """One fetch for the batch; every rank returns its own heads, merged here."""
        if not ids:
            return []
        if self._leftover:
            self.llm.collective_rpc("hook_runtime_discard", args=(self._leftover,))
            self._leftover = []
        ranks = self.llm.collective_rpc("hook_runtime_take", args=(ids,))
        return [
            merge_ranks([rank[i] for rank in ranks], request) for i, request in enumerate(requests)
        ]

    def _capture(
        self, request: CaptureRequest, result: dict[str, Any], output: Any, redone: bool
    ) -> Capture:
        if "error" in result:
            raise ProbeError(result["error"])
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

    # ------------------------------------------------------------ the workers

    def _install(self) -> list[dict[str, Any]]:
        installed = self.llm.collective_rpc("hook_runtime_install")
        for rank in installed:
            if "error" in rank:
                raise ERRORS.get(rank["kind"], UnsupportedModelError)(rank["error"])
        return installed

    def _ensure_held(self, requests: Iterable[CaptureRequest]) -> None:
        wanted = {h for r in requests if r.probe.heads != "all" for h in r.probe.heads}
        if not wanted <= self._held:
            self._hold(self._held | wanted)

    def _hold(self, heads: frozenset[Head]) -> None:
        self._held = frozenset()  # the workers let go of the old shadow first
        sizes = self.llm.collective_rpc(
            "hook_runtime_shadow", args=([list(h) for h in sorted(heads)],)
        )
        self._held = heads
        self.shadow_bytes = sum(sizes)
        self._generation += 1  # what is cached so far was not captured for these heads

    def _salt(self, probe: AttentionProbe) -> str:
        """Captures have a prefix cache of their own, in which every block has been captured."""
        if probe.heads == "all":
            return "hook_runtime/all"
        return f"hook_runtime/{self._generation}"

    # ------------------------------------------------------------ checks

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this HookLLM is closed; create a new one.")

    def _check_whole(self) -> None:
        self._check_open()
        if self._model.layers_kept < self._model.num_layers:
            raise UnsupportedModelError(
                f"this engine keeps {self._model.layers_kept} of {self._model.num_layers} layers "
                "and can only capture; create it with layers=None to generate text."
            )

    def _check_request(self, request: CaptureRequest) -> None:
        probe, size = request.probe, len(request.prompt_token_ids)
        if size >= self._model.max_model_len:
            raise ProbeError(
                f"the prompt has {size} tokens; this engine takes at most "
                f"{self._model.max_model_len - 1} (max_model_len less one generated token)."
            )
        if probe.heads != "all":
            self._model.check_heads(probe.heads)
            return
        limit = self.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
        if size > limit:
            raise ProbeError(
                f"a probe of all heads needs its prompt in one prefill chunk: {size} tokens do not "
                f"fit max_num_batched_tokens={limit}; raise it, or name the heads."
            )

    def _tokens(self, prompt: Any) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer(prompt)["input_ids"])
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
