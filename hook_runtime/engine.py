"""HookLLM: vLLM's LLM with attention probes, in this process's terms: requests in, captures out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from . import compat
from .errors import ClosedError, IncompleteCaptureError, ProbeError
from .exchange import merge_ranks, one_token, per_prompt
from .guard import refuse_unguarded_script
from .options import check_running, engine_options, model_info, raise_refusal
from .session import Session, Submission, engine_alive, probed_request, shadow_arguments
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo

MAX_BATCH = 8192  # requests in one generate: bounds what the workers keep for one fetch


@dataclass(frozen=True, slots=True)
class Probed:
    """What `HookLLM.probe` returns: vLLM's outputs, and a capture where a prompt had a probe."""

    outputs: list[Any]
    captures: list[Capture | None]


@dataclass(frozen=True, slots=True)
class _Ordinary:
    """Prompts without a probe that run in the same engine batch, and their parameters."""

    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)


_NONE = _Ordinary()


class HookLLM:
    """vLLM's ``LLM`` with an attention probe on any request.

    Args:
        model: Hugging Face id or local folder.
        heads: heads to hold from the start; vLLM's KV cache leaves room for them. Others asked
            for later are added then, memory permitting, which empties the captured prefix cache.
            None waits for the first capture.
        layers: None loads the whole model; ``"auto"`` loads and runs only the layers up to the
            last of ``heads``; a number keeps that many. A cut engine captures but cannot generate.
        name: the model's name in `ModelInfo`; defaults to ``model``.
        **engine: any argument of ``vllm.LLM``. Defaults are vLLM's, except on a CPU, where
            ``kv_cache_memory_bytes`` is bounded and ``block_size`` is 32 (see `options`).

    Raises:
        UnsupportedVLLMError: vLLM is missing, lacks a needed symbol, or runs in a mode ruled out.
        UnsupportedModelError: the model's attention cannot be captured exactly; with the reason.
        ProbeError: a head does not exist or lies beyond the layers kept.
        ShadowMemoryError: the heads do not fit the memory.

    Calls may come from several threads; they take turns.
    """

    def __init__(
        self,
        model: str,
        *,
        heads: Iterable[Any] | None = None,
        layers: int | Literal["auto"] | None = None,
        name: str | None = None,
        programs: bool = False,
        **engine: Any,
    ) -> None:
        compat.check_version()
        refuse_unguarded_script()
        chosen = tuple(Head.parse(h) for h in heads) if heads is not None else ()
        options = engine_options(model, chosen, layers, engine, programs=programs)
        self._lock = threading.RLock()
        self._closed = False
        self._leftover: list[str] = []  # captures of interrupted batches, to be dropped
        self.llm = compat.symbol("vllm", "LLM")(model=model, **options.engine)
        try:
            compat.wake_when_engine_dies(self.llm.llm_engine.engine_core)
            vllm_config = self.llm.llm_engine.vllm_config
            check_running(vllm_config)
            installed = self._rpc("hook_runtime_install")
            raise_refusal(installed)
            info = model_info(vllm_config, name or model, options, installed)
            self._session = Session(info, vllm_config, installed)
            self.kv_bytes = sum(r["kv_bytes"] for r in installed)
            self.runner = str(installed[0]["runner"])
            self.model.check_heads(chosen)
            if chosen:
                self._hold(frozenset(chosen), first=True)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ the public side

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._session.model

    @property
    def shadow_bytes(self) -> int:
        """What the heads held take on all workers, beside the KV cache's ``kv_bytes``."""
        return self._session.shadow_bytes

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        self._check_open()
        return self.llm.get_tokenizer()

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = False, **kwargs: Any
    ) -> list[Any]:
        """vLLM's ``LLM.generate``, unchanged; refused on an engine with layers cut off."""
        self._check_open()
        self._session.check_whole()
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
            ShadowMemoryError: the heads do not fit the memory.
            EngineDeadError: vLLM's engine process is gone.
            ClosedError: after ``close()``.
        """
        requests = list(requests)
        with self._lock:
            self._check_open()
            for request in requests:
                self._session.check(request)
            self._ensure_held(requests)
            return self._run(requests, [one_token()] * len(requests), _NONE, progress)[1]

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
        self._check_open()
        self._session.check_whole()
        if len(prompts) != len(probes):
            raise ProbeError(f"{len(prompts)} prompts but {len(probes)} probes: give one a prompt.")
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        params = per_prompt(sampling_params, len(prompts))
        chosen = {i: p for i, p in enumerate(probes) if p is not None}
        others = [i for i, p in enumerate(probes) if p is None]
        with self._lock:
            self._check_open()
            tokenizer = self.tokenizer
            requests = [probed_request(prompts[i], p, tokenizer) for i, p in chosen.items()]
            for request in requests:
                self._session.check(request)
            self._ensure_held(requests)
            ordinary = _Ordinary([prompts[i] for i in others], [params[i] for i in others])
            outputs, captures = self._run(requests, [params[i] for i in chosen], ordinary, progress)
        by_prompt: list[Capture | None] = [None] * len(prompts)
        for i, capture in zip(chosen, captures, strict=True):
            by_prompt[i] = capture
        ordered = dict(zip([*chosen, *others], outputs, strict=True))
        return Probed([ordered[i] for i in range(len(prompts))], by_prompt)

    def stats(self) -> list[dict[str, int]]:
        """What each worker's side of the runtime keeps: requests followed, results, blocks, ..."""
        with self._lock:
            self._check_open()
            return self._rpc("hook_runtime_stats")

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
        ordinary: _Ordinary,
        progress: bool,
    ) -> tuple[list[Any], list[Capture]]:
        """Probed requests first, then the ordinary ones; outputs in that order."""
        session = self._session
        outputs: list[Any] = []
        results: list[dict[str, Any]] = []
        sent: list[Submission] = []
        for group in self._groups(requests):
            batch = [session.submission(requests[i], params[i]) for i in group]
            last = group.stop == len(requests)
            new_outputs, new_results = self._submit(batch, ordinary if last else _NONE, progress)
            outputs.extend(new_outputs)
            results.extend(new_results)
            sent.extend(batch)
        again = [i for i, r in enumerate(results) if "incomplete" in r]
        for i in again:
            if results[i].get("stale"):
                session.leave_cache(sent[i])
            batch = [session.submission(requests[i], one_token(), fresh=True)]
            _, (results[i],) = self._submit(batch, _NONE, False)
        redone = set(again)
        captures = [
            session.capture(request, result, outputs[i], i in redone)
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
        for i, request in enumerate(requests):
            size = len(request.prompt_token_ids)
            full = tokens + size > self._session.max_num_batched_tokens
            if i > start and (full or i - start == self._session.max_num_seqs):
                yield range(start, i)
                start, tokens = i, 0
            tokens += size
        yield range(start, len(requests))

    def _submit(
        self, batch: list[Submission], ordinary: _Ordinary, progress: bool
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """One ``generate`` and one fetch."""
        with self._tidied_after_interrupt([s.capture_id for s in batch]):
            outputs = self.llm.generate(
                [*(s.prompt for s in batch), *ordinary.prompts],
                [*(s.params for s in batch), *ordinary.params],
                use_tqdm=progress,
            )
            expected = len(batch) + len(ordinary.prompts)
            if len(outputs) != expected:
                raise IncompleteCaptureError(
                    f"vLLM returned {len(outputs)} outputs for {expected} requests: some were "
                    "aborted from outside while the batch ran. Run the batch again."
                )
        return outputs, self._take(batch)

    @contextlib.contextmanager
    def _tidied_after_interrupt(self, ids: Sequence[str]) -> Iterator[None]:
        """vLLM leaves an interrupted batch running, and would return it with the next one."""
        try:
            with engine_alive():
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

    def _take(self, batch: list[Submission]) -> list[dict[str, Any]]:
        """One fetch for the batch; every rank returns its own heads, merged here."""
        if not batch:
            return []
        ids, unwanted = [s.capture_id for s in batch], list(self._leftover)
        try:
            ranks = self._rpc("hook_runtime_take", ids, unwanted)
        except BaseException:
            self._leftover.extend(ids)
            raise
        del self._leftover[: len(unwanted)]
        return [merge_ranks([rank[i] for rank in ranks], s.request) for i, s in enumerate(batch)]

    # ------------------------------------------------------------ the workers

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        with engine_alive():
            return self.llm.collective_rpc(method, args=args)

    def _ensure_held(self, requests: Iterable[CaptureRequest]) -> None:
        heads = self._session.to_hold(requests)
        if heads is not None:
            self._hold(heads)

    def _hold(self, heads: frozenset[Head], first: bool = False) -> None:
        try:
            workers = self._rpc("hook_runtime_shadow", *shadow_arguments(heads, first))
        except BaseException:
            self._session.let_go()
            raise
        refusal = self._session.refused(heads, workers)
        if refusal is not None:
            if any("bytes" in worker for worker in workers):  # these let go of what they held
                old = self._session.held
                workers = self._rpc("hook_runtime_shadow", *shadow_arguments(old, True))
                self._session.now_holds(old, workers)
            raise refusal
        self._session.now_holds(heads, workers)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this HookLLM is closed; create a new one.")
