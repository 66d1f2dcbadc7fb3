"""AsyncHookLLM: vLLM's AsyncLLM with attention probes; many callers share the engine's batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
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

    A probe of all heads needs a prefill step with room for its whole prompt: beside other requests
    it may stay incomplete. `HookLLM` makes that room.
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
        self._calls: set[asyncio.Task[Any]] = set()
        self._engines = compat.count_engines(engine.engine_core)
        self._fetchers = [Fetcher(partial(self._rpc_on, rank)) for rank in range(self._engines)]
        self._router = Router(self._engines)

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
        self.check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        kwargs.setdefault("request_id", self._request_id())
        with engine_alive():
            async for output in self.engine.generate(prompt, sampling_params, **kwargs):
                yield output

    async def capture(
        self, requests: Sequence[CaptureRequest], on_done: Callable[[], object] = lambda: None
    ) -> list[Capture]:
        """Run all requests, in batches with everybody else's; captures in request order.

        ``on_done`` is called after each. Errors are those of ``HookLLM.capture``; the first
        cancels the other requests of the call.
        """
        requests = list(requests)
        self.check_open()
        for request in requests:
            self._session.check(request)
        with self._call():
            await self._ensure_held(requests)
            return await self._in_turn(requests, on_done)

    async def probe(
        self, prompt: Any, probe: AttentionProbe, sampling_params: Any = None
    ) -> tuple[Any, Capture]:
        """Generate as usual and capture: vLLM's final output, and what the probe read."""
        self.check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        request = probed_request(prompt, probe, self._tokenizer)
        self._session.check(request)
        with self._call():
            await self._ensure_held([request])
            return await self._captured(request, sampling_params, asyncio.Event())

    def use_engines(self, count: int) -> None:
        """Send new requests to the first so many data-parallel engines only."""
        if not 1 <= count <= self._engines:
            raise ValueError(f"{count} engines asked for: give a number from 1 to {self._engines}.")
        self._router = Router(count)

    async def check_health(self) -> None:
        """Raise EngineDeadError once vLLM's engine process is gone, ClosedError after ``close``."""
        self.check_open()
        with engine_alive():
            await self.engine.check_health()

    async def stats(self) -> list[dict[str, int]]:
        """What each worker's side of the runtime keeps: requests followed, results, blocks, ..."""
        self.check_open()
        return await self._rpc("hook_runtime_stats")

    async def close(self) -> None:
        """Stop the engine and free its memory; further calls raise ClosedError."""
        if self._closed:
            return
        self._closed = True
        calls = self._calls - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for fetcher in self._fetchers:
            await fetcher.close()
        self.engine.shutdown()

    async def __aenter__(self) -> AsyncHookLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ one request

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """A call that ``close`` ends: its caller then gets ClosedError, not a cancellation."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed:
                task.uncancel()
                self.check_open()
            raise
        finally:
            self._calls.discard(task)

    async def _in_turn(
        self, requests: list[CaptureRequest], on_done: Callable[[], object]
    ) -> list[Capture]:
        """No more of one call is in the engine than keeps it busy: vLLM serves first come first,
        and another caller's request would wait for all of it."""
        limit = STEPS_AHEAD * self._session.max_num_batched_tokens * self._engines
        tasks: list[asyncio.Task[tuple[Any, Capture]]] = []
        in_engine: dict[asyncio.Task[Any], int] = {}
        try:
            for request in requests:
                size = len(request.prompt_token_ids)
                while in_engine and sum(in_engine.values()) + size > limit:
                    done, _ = await asyncio.wait(in_engine, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        del in_engine[task]
                    for task in tasks:
                        if task.done():
                            task.result()  # raises at once what went wrong
                left_engine = asyncio.Event()
                tasks.append(asyncio.create_task(self._captured(request, one_token(), left_engine)))
                tasks[-1].add_done_callback(lambda _: on_done())
                in_engine[asyncio.create_task(left_engine.wait())] = size
            return [capture for _, capture in await asyncio.gather(*tasks)]
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            for task in in_engine:
                task.cancel()

    async def _captured(
        self, request: CaptureRequest, params: Any, left_engine: asyncio.Event
    ) -> tuple[Any, Capture]:
        """Sets ``left_engine`` once the request is computed: fetching needs no room there."""
        try:
            if request.probe.heads != "all":
                return await self._run(request, params, left_engine)
            async with self._whole_prompts:  # each needs a step with room for its whole prompt
                return await self._run(request, params, left_engine)
        finally:
            left_engine.set()

    async def _run(
        self, request: CaptureRequest, params: Any, left_engine: asyncio.Event
    ) -> tuple[Any, Capture]:
        """The output is the first try's: later ones only capture."""
        session = self._session
        output: Any = None
        result: dict[str, Any] = {}
        for attempt in range(TRIES):
            submission = session.submission(
                request, params if attempt == 0 else one_token(), fresh=attempt > 0
            )
            rank, ended = await self._submit(submission)
            left_engine.set()
            output = output or ended
            workers = await self._fetchers[rank].fetch(submission.capture_id)
            result = merge_ranks(workers, request)
            if result.get("stale"):
                session.leave_cache(submission)
            if "incomplete" not in result:
                return output, session.capture(request, result, ended, attempt > 0)
        return output, session.capture(request, result, output, redone=True)

    async def _submit(self, submission: Submission) -> tuple[int, Any]:
        """The engine that ran the request, and its final output.

        Cancelled, vLLM aborts it, and its capture is dropped.
        """
        request = submission.request
        size = len(request.prompt_token_ids)
        before = request.prompt_token_ids[: request.probe.query_span[0]]
        router = self._router
        rank = router.assign(hash(before), size)
        final = None
        try:
            with engine_alive():
                async for output in self.engine.generate(
                    submission.prompt,
                    submission.params,
                    self._request_id(),
                    data_parallel_rank=rank if self._engines > 1 else None,
                ):
                    final = output
        except BaseException:
            if not self._closed:
                self._fetchers[rank].discard(submission.capture_id)
            raise
        finally:
            router.release(rank, size)
        return rank, final

    def _request_id(self) -> str:
        return f"hook-runtime-{next(self._requests)}"

    async def _default_params(self) -> Any:
        params = compat.symbol("vllm", "SamplingParams")
        defaults = self.engine.model_config.get_diff_sampling_param()
        return params(**defaults) if defaults else params()

    # ------------------------------------------------------------ the workers

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """The answers of all workers of all engines."""
        answers = await asyncio.gather(
            *(self._rpc_on(rank, method, *args) for rank in range(self._engines))
        )
        return [answer for engine in answers for answer in engine]

    async def _rpc_on(self, rank: int, method: str, *args: Any) -> list[Any]:
        with engine_alive():
            return await compat.call_engine(self.engine.engine_core, rank, method, args)

    async def _install(self, heads: frozenset[Head]) -> None:
        vllm_config = self.engine.vllm_config
        check_running(vllm_config, data_parallel=True)
        installed = await self._rpc("hook_runtime_install")
        raise_refusal(installed)
        info = model_info(vllm_config, self._name, self._options, installed)
        self._session = Session(info, vllm_config, installed, self._engines)
        self._tokenizer = self.engine.get_tokenizer()
        if asyncio.iscoroutine(self._tokenizer):
            self._tokenizer = await self._tokenizer
        self.kv_bytes = sum(r["kv_bytes"] for r in installed)
        self.runner = str(installed[0]["runner"])
        info.check_heads(heads)
        if heads:
            await self._hold(heads, first=True)

    async def _ensure_held(self, requests: Sequence[CaptureRequest]) -> None:
        if self._session.to_hold(requests) is None:
            return
        async with self._growing:
            heads = self._session.to_hold(requests)
            if heads is not None:
                await self._hold(heads)

    async def _hold(self, heads: frozenset[Head], first: bool = False) -> None:
        try:
            workers = await self._rpc("hook_runtime_shadow", *shadow_arguments(heads, first))
        except BaseException:
            self._session.let_go()
            raise
        refusal = self._session.refused(heads, workers)
        if refusal is not None:
            if any("bytes" in worker for worker in workers):  # these let go of what they held
                old = self._session.held
                workers = await self._rpc("hook_runtime_shadow", *shadow_arguments(old, True))
                self._session.now_holds(old, workers)
            raise refusal
        self._session.now_holds(heads, workers)

    def check_open(self) -> None:
        """Raise EngineDeadError where the engine's process is known to be gone, ClosedError after
        ``close``."""
        if self._closed:
            raise ClosedError("this AsyncHookLLM is closed; start a new one.")
        if self.engine.errored:
            raise EngineDeadError("vLLM's engine process died; close this engine, start a new one.")
