"""HookLLM: vLLM's LLM with attention probes, in this process's terms: requests in, captures out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import compat
from .conductor import MAX_BATCH, MAX_CAPTURE_BYTES, Run, with_program, with_salt
from .desk import CONFIG, configured
from .errors import ClosedError, IncompleteCaptureError, ProbeError
from .exchange import merge_ranks, one_token, per_prompt
from .guard import refuse_unguarded_script
from .hooked import Call
from .options import check_running, engine_options
from .session import Ask, Submission, engine_alive, probed_request, token_ids
from .specs import AttentionProbe, Capture, CaptureRequest, Head
from .sync_programs import SyncPrograms

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Probed:
    """What `HookLLM.probe` returns: vLLM's outputs, and a capture where a prompt had a probe."""

    outputs: list[Any]
    captures: list[Capture | None]


@dataclass(frozen=True, slots=True)
class _Ordinary:
    """Prompts without a probe that run in the same engine batch, with what belongs to each."""

    prompts: list[Any] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    adapters: list[Any] = field(default_factory=list)


_NONE = _Ordinary()


class HookLLM(SyncPrograms):
    """vLLM's ``LLM`` with an attention probe or a program on any request.

    Args:
        model: Hugging Face id or local folder; None takes it from ``config``, with its revision.
        heads: heads to hold from the start; vLLM's KV cache leaves room for them. Others asked
            for later are added then, memory permitting, which empties the captured prefix cache.
            None waits for the first capture.
        layers: None loads the whole model; ``"auto"`` loads and runs only the layers up to the
            last of ``heads``; a number keeps that many. A cut engine captures but cannot generate.
        name: the model's name in `ModelInfo`; defaults to ``model``.
        config: path of a program's config (see `hook_runtime.config`): requests of ``generate``,
            ``chat`` and ``perform`` that name no other program run it.
        programs: compile the model with doors to its residual stream, which programs on hidden
            states need, unless the engine runs eagerly; None does so where ``config`` needs it.
        max_capture_bytes: the most that the programs of one call may read.
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
        model: str | None = None,
        *,
        heads: Iterable[Any] | None = None,
        layers: int | Literal["auto"] | None = None,
        name: str | None = None,
        config: str | Path | None = None,
        programs: bool | None = None,
        max_capture_bytes: int = MAX_CAPTURE_BYTES,
        **engine: Any,
    ) -> None:
        compat.check_version()
        refuse_unguarded_script()
        chosen = tuple(Head.parse(h) for h in heads) if heads is not None else ()
        model, programs = configured(model, config, programs, engine)
        options = engine_options(model, chosen, layers, engine, programs=programs)
        self._lock = threading.RLock()
        self._closed = False
        self._leftover: list[str] = []  # captures of interrupted batches, to be dropped
        self._leftover_runs: list[str] = []
        self._begin_programs(max_capture_bytes)
        self.llm = compat.symbol("vllm", "LLM")(model=model, **options.engine)
        try:
            compat.wake_when_engine_dies(self.llm.llm_engine.engine_core)
            vllm_config = self.llm.llm_engine.vllm_config
            check_running(vllm_config)
            self._perform(self._install(vllm_config, name or model, options, chosen))
            if config is not None:
                self.load_program(CONFIG, config, default=True)
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ the public side

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        self._check_open()
        return self.llm.get_tokenizer()

    def _generate(self, prompts: Any, sampling_params: Any, **kwargs: Any) -> list[Any]:
        self._session.check_whole()
        with self._lock:
            self._check_open()
            with self._tidied_after_interrupt(()):
                return self.llm.generate(prompts, sampling_params, **kwargs)

    def capture(
        self,
        requests: Sequence[CaptureRequest],
        *,
        lora_request: Any = None,
        progress: bool = False,
    ) -> list[Capture]:
        """Run all requests as one engine batch; captures in request order.

        A request whose cached prefix had not been captured is computed again from scratch.
        ``lora_request`` is vLLM's ``LoRARequest``, one for all or a list with one, or None, a
        request; the engine must have been started with ``enable_lora=True``.

        Raises:
            ProbeError: a head does not exist, a prompt does not fit the engine, or it takes no
                adapters.
            UnsupportedVLLMError: on a CPU, requests with and without an adapter in one call.
            IncompleteCaptureError: rows were missing even then; partial numbers never come back.
            ShadowMemoryError: the heads do not fit the memory.
            EngineDeadError: vLLM's engine process is gone.
            ClosedError: after ``close()``.
        """
        requests = list(requests)
        with self._lock:
            self._check_open()
            adapters = per_prompt(lora_request, len(requests), "LoRA requests")
            params = one_token()
            asks = [Ask(r, params, a) for r, a in zip(requests, adapters, strict=True)]
            self._check(asks, _NONE)
            self._ensure_held(requests)
            return self._run(asks, _NONE, progress)[1]

    def probe(
        self,
        prompts: Sequence[Any],
        probes: Sequence[AttentionProbe | None],
        sampling_params: Any = None,
        *,
        lora_request: Any = None,
        progress: bool = False,
    ) -> Probed:
        """Generate as usual and capture where ``probes[i]`` is not None, in one engine batch.

        Prompts are vLLM's; a probed one must be text or token ids. Sampling parameters and LoRA
        requests are one for all or one a prompt; a probed request must ask for one completion
        (``n=1``). No program runs, neither the default one: that is ``perform(probes=...)``.
        Errors are those of ``capture``.
        """
        self._check_open()
        self._session.check_whole()
        if len(prompts) != len(probes):
            raise ProbeError(f"{len(prompts)} prompts but {len(probes)} probes: give one a prompt.")
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        params = per_prompt(sampling_params, len(prompts), "sampling parameters")
        adapters = per_prompt(lora_request, len(prompts), "LoRA requests")
        with self._lock:
            self._check_open()
            return self._probe(prompts, probes, params, adapters, {}, progress)

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

    def _probe(
        self,
        prompts: Sequence[Any],
        probes: Sequence[AttentionProbe | None],
        params: Sequence[Any],
        adapters: Sequence[Any],
        runs: Mapping[int, Run],
        progress: bool,
    ) -> Probed:
        """One engine batch; ``runs`` are the programs, by prompt."""
        chosen = {i: p for i, p in enumerate(probes) if p is not None}
        others = [i for i, p in enumerate(probes) if p is None]
        tokenizer = self.tokenizer
        asks = [
            Ask(probed_request(prompts[i], p, tokenizer), params[i], adapters[i], runs.get(i))
            for i, p in chosen.items()
        ]
        ordinary = _Ordinary(
            [_salted(prompts[i], runs.get(i), tokenizer) for i in others],
            [with_program(params[i], runs[i]) if i in runs else params[i] for i in others],
            [adapters[i] for i in others],
        )
        self._check(asks, ordinary)
        self._ensure_held(ask.request for ask in asks)
        outputs, captures = self._run(asks, ordinary, progress)
        by_prompt: list[Capture | None] = [None] * len(prompts)
        for i, capture in zip(chosen, captures, strict=True):
            by_prompt[i] = capture
        ordered = dict(zip([*chosen, *others], outputs, strict=True))
        return Probed([ordered[i] for i in range(len(prompts))], by_prompt)

    def _check(self, asks: Sequence[Ask], ordinary: _Ordinary) -> None:
        for ask in asks:
            self._session.check(ask.request, ask.adapter)
        self._session.check_mixture([*(ask.adapter for ask in asks), *ordinary.adapters])

    def _run(
        self, asks: list[Ask], ordinary: _Ordinary, progress: bool
    ) -> tuple[list[Any], list[Capture]]:
        """Probed requests first, then the ordinary ones; outputs in that order."""
        session = self._session
        outputs: list[Any] = []
        results: list[dict[str, Any]] = []
        sent: list[Submission] = []
        for group in self._groups([ask.request for ask in asks]):
            batch = [session.submission(asks[i]) for i in group]
            last = group.stop == len(asks)
            new_outputs, new_results = self._submit(batch, ordinary if last else _NONE, progress)
            outputs.extend(new_outputs)
            results.extend(new_results)
            sent.extend(batch)
        again = [i for i, r in enumerate(results) if "incomplete" in r]
        for i in again:
            if results[i].get("stale"):
                session.leave_cache(sent[i])
            results[i] = self._once_more(asks[i])
        redone = set(again)
        captures = [
            session.capture(ask.request, result, outputs[i], 2 if i in redone else 1)
            for i, (ask, result) in enumerate(zip(asks, results, strict=True))
        ]
        return outputs, captures

    def _once_more(self, ask: Ask) -> dict[str, Any]:
        """Only to capture; what its program reads is known from the first time."""
        run = ask.run
        if run is not None and self._conductor is not None:
            run = self._conductor.again(run)
        ask = ask._replace(params=one_token(), run=run)
        try:
            submission = self._session.submission(ask, fresh=True)
            _, (result,) = self._submit([submission], _NONE, False)
            if run is not None:  # attention without the program would be another model's
                self._perform(self._fetched([run], [1], []))
        except BaseException:
            if run is not None:
                self._leftover_runs.append(run.run_id)
            raise
        return result

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
                lora_request=[*(s.adapter for s in batch), *ordinary.adapters],
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
            self._perform(self._hold(heads))

    def _perform(self, steps: Generator[Call, list[Any], T]) -> T:
        try:
            call = next(steps)
            while True:
                try:
                    answers = self._rpc(call.method, *call.arguments)
                except BaseException as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answers)
        except StopIteration as done:
            return done.value

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this HookLLM is closed; create a new one.")


def _salted(prompt: Any, run: Run | None, tokenizer: Any) -> Any:
    """The prompt as vLLM takes it; one with a program as token ids, apart in the prefix cache."""
    if run is None:
        return prompt
    return with_salt({"prompt_token_ids": list(token_ids(prompt, tokenizer))}, run)
