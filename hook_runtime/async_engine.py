"""AsyncHookLLM: vLLM's AsyncLLM with attention probes; many callers share the engine's batches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, Literal

from . import compat
from .errors import ClosedError, EngineDeadError
from .exchange import merge_ranks, one_token
from .fetcher import Fetcher
from .guard import refuse_unguarded_script
from .options import EngineOptions, check_running, engine_options, model_info, raise_refusal
from .router import Router
from .session import Session, Submission, engine_alive, probed_request, shadow_arguments
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo

TRIES = 4
"""A request is computed again where its prefix was not captured, or where the shadow was grown for
another caller meanwhile."""
STEPS_AHEAD = 4
"""Prefill steps of one call that may wait in the engine."""


class AsyncHookLLM:
    """vLLM's ``AsyncLLM`` with an attention probe on any request. Made by ``await start(...)``.

    Callers need not know of each other: their requests share the engine's batches, whatever heads
    they read. Cancelling a call cancels its requests in the engine. Use from one event loop.
    """

    def __init__(self, engine: Any, options: EngineOptions, name: str) -> None:
        """Use ``start``."""
        self.engine = engine
        self._options = options
        self._name = name
        self._closed = False
        self._requests = itertools.count()
        self._growing = asyncio.Lock()
        self._whole_prompts = asyncio.Lock()
        self._fetcher = Fetcher(self._rpc)
        parallel = engine.vllm_config.parallel_config.data_parallel_size
        self._router = Router(parallel) if parallel > 1 else None

    @classmethod
    async def start(
        cls,
        model: str,
        *,
        heads: Iterable[Any] | None = None,
        layers: int | Literal["auto"] | None = None,
        name: str | None = None,
        **engine: Any,
    ) -> AsyncHookLLM:
        """Start the engine, which takes the event loop until it is there.

        Arguments and errors are those of `HookLLM`, ``engine`` being those of vLLM's
        ``AsyncEngineArgs``. With ``data_parallel_size`` above one, a query and its null pass, and
        later queries about the same documents, go to the same engine.
        """
        compat.check_version()
        refuse_unguarded_script()
        chosen = tuple(Head.parse(h) for h in heads) if heads is not None else ()
        options = engine_options(model, chosen, layers, engine, data_parallel=True)
        arguments = compat.symbol("vllm.engine.arg_utils", "AsyncEngineArgs")
        running = compat.symbol("vllm.v1.engine.async_llm", "AsyncLLM").from_engine_args(
            arguments(model=model, **options.engine)
        )
        made = cls(running, options, name or model)
        try:
            await made._install(frozenset(chosen))
        except BaseException:
            await made.close()
            raise
        return made

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
        return self._tokenizer

    async def generate(
        self, prompt: Any, sampling_params: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """vLLM's ``AsyncLLM.generate``, with a request id of its own where none is given."""
        self._check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        kwargs.setdefault("request_id", self._request_id())
        with engine_alive():
            async for output in self.engine.generate(prompt, sampling_params, **kwargs):
                yield output

    async def capture(self, requests: Sequence[CaptureRequest]) -> list[Capture]:
        """Run all requests, in batches with everybody else's; captures in request order.

        Errors are those of ``HookLLM.capture``; the first cancels the other requests of the call.
        """
        requests = list(requests)
        self._check_open()
        for request in requests:
            self._session.check(request)
        await self._ensure_held(requests)
        return await self._in_turn(requests)

    async def probe(
        self, prompt: Any, probe: AttentionProbe, sampling_params: Any = None
    ) -> tuple[Any, Capture]:
        """Generate as usual and capture: vLLM's final output, and what the probe read."""
        self._check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        request = probed_request(prompt, probe, self._tokenizer)
        self._session.check(request)
        await self._ensure_held([request])
        return await self._captured(request, sampling_params)

    async def check_health(self) -> None:
        """Raise EngineDeadError once vLLM's engine process is gone, ClosedError after ``close``."""
        self._check_open()
        with engine_alive():
            await self.engine.check_health()

    async def stats(self) -> list[dict[str, int]]:
        """What each worker's side of the runtime keeps: requests followed, results, blocks, ..."""
        self._check_open()
        return await self._rpc("hook_runtime_stats")

    async def close(self) -> None:
        """Stop the engine and free its memory; further calls raise ClosedError."""
        if self._closed:
            return
        self._closed = True
        await self._fetcher.close()
        self.engine.shutdown()

    async def __aenter__(self) -> AsyncHookLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ one request

    async def _in_turn(self, requests: list[CaptureRequest]) -> list[Capture]:
        """No more of one call is in the engine than keeps it busy: vLLM serves first come first,
        and another caller's request would wait for all of it."""
        limit = STEPS_AHEAD * self._session.max_num_batched_tokens
        tasks: list[asyncio.Task[tuple[Any, Capture]]] = []
        in_engine: dict[asyncio.Task[tuple[Any, Capture]], int] = {}
        try:
            for request in requests:
                size = len(request.prompt_token_ids)
                while in_engine and sum(in_engine.values()) + size > limit:
                    done, _ = await asyncio.wait(in_engine, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        del in_engine[task]
                        task.result()  # raises at once what went wrong
                tasks.append(asyncio.create_task(self._captured(request, one_token())))
                in_engine[tasks[-1]] = size
            return [capture for _, capture in await asyncio.gather(*tasks)]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _captured(self, request: CaptureRequest, params: Any) -> tuple[Any, Capture]:
        if request.probe.heads != "all":
            return await self._run(request, params)
        async with self._whole_prompts:  # each needs a prefill step with room for its whole prompt
            return await self._run(request, params)

    async def _run(self, request: CaptureRequest, params: Any) -> tuple[Any, Capture]:
        """The output is the first try's: later ones only capture."""
        session = self._session
        output: Any = None
        result: dict[str, Any] = {}
        for attempt in range(TRIES):
            submission = session.submission(
                request, params if attempt == 0 else one_token(), fresh=attempt > 0
            )
            ended = await self._submit(submission)
            output = output or ended
            result = merge_ranks(await self._fetcher.fetch(submission.capture_id), request)
            if result.get("stale"):
                session.leave_cache()
            if "incomplete" not in result:
                return output, session.capture(request, result, ended, attempt > 0)
        return output, session.capture(request, result, output, redone=True)

    async def _submit(self, submission: Submission) -> Any:
        """The request's final output. Cancelled, vLLM aborts it, and its capture is dropped."""
        request, rank = submission.request, None
        size = len(request.prompt_token_ids)
        if self._router is not None:
            before = request.prompt_token_ids[: request.probe.query_span[0]]
            rank = self._router.assign(hash(before), size)
        final = None
        try:
            with engine_alive():
                async for output in self.engine.generate(
                    submission.prompt,
                    submission.params,
                    self._request_id(),
                    data_parallel_rank=rank,
                ):
                    final = output
        except BaseException:
            if not self._closed:
                self._fetcher.discard(submission.capture_id)
            raise
        finally:
            if self._router is not None and rank is not None:
                self._router.release(rank, size)
        return final

    def _request_id(self) -> str:
        return f"hook-runtime-{next(self._requests)}"

    async def _default_params(self) -> Any:
        params = compat.symbol("vllm", "SamplingParams")
        defaults = self.engine.model_config.get_diff_sampling_param()
        return params(**defaults) if defaults else params()

    # ------------------------------------------------------------ the workers

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        with engine_alive():
            return await compat.call_every_engine(self.engine.engine_core, method, args)

    async def _install(self, heads: frozenset[Head]) -> None:
        vllm_config = self.engine.vllm_config
        check_running(vllm_config, data_parallel=True)
        installed = await self._rpc("hook_runtime_install")
        raise_refusal(installed)
        info = model_info(vllm_config, self._name, self._options, installed)
        self._session = Session(info, vllm_config, installed)
        self._tokenizer = self.engine.get_tokenizer()
        if asyncio.iscoroutine(self._tokenizer):
            self._tokenizer = await self._tokenizer
        self.kv_bytes = sum(r["kv_bytes"] for r in installed)
        self.runner = str(installed[0]["runner"])
        info.check_heads(heads)
        if heads:
            await self._hold(heads)

    async def _ensure_held(self, requests: Sequence[CaptureRequest]) -> None:
        if self._session.to_hold(requests) is None:
            return
        async with self._growing:
            heads = self._session.to_hold(requests)
            if heads is not None:
                await self._hold(heads)

    async def _hold(self, heads: frozenset[Head]) -> None:
        workers = await self._rpc("hook_runtime_shadow", *shadow_arguments(heads))
        refusal = self._session.refused(heads, workers)
        if refusal is not None:
            if any("bytes" in worker for worker in workers):  # these let go of what they held
                old = self._session.held
                workers = await self._rpc("hook_runtime_shadow", *shadow_arguments(old, True))
                self._session.now_holds(old, workers)
            raise refusal
        self._session.now_holds(heads, workers)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this AsyncHookLLM is closed; start a new one.")
        if self.engine.errored:
            raise EngineDeadError("vLLM's engine process died; close this engine, start a new one.")
