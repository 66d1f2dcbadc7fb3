"""AsyncHookLLM: vLLM's AsyncLLM with attention probes; many callers share the engine's batches."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import compat
from .ahead import Prompt, Room, in_turn, tokens_to_compute
from .async_programs import AsyncPrograms
from .conductor import MAX_CAPTURE_BYTES
from .desk import CONFIG, configured
from .errors import ClosedError, EngineDeadError
from .exchange import merge_ranks, one_token, per_prompt
from .fetcher import Fetcher
from .gate import Gate
from .guard import refuse_unguarded_script
from .hooked import Call
from .options import EngineOptions, check_running, engine_options
from .router import Router
from .session import Ask, Submission, engine_alive, probed_request
from .specs import AttentionProbe, Capture, CaptureRequest, Head

T = TypeVar("T")
TRIES = 4
"""A request is computed again where its prefix was not captured, or where the shadow was grown for
another caller meanwhile."""
POLL_S = 0.005
"""How often to look whether there is room for a probe of all heads."""


class AsyncHookLLM(AsyncPrograms):
    """vLLM's ``AsyncLLM`` with an attention probe or a program on any request.

    Made by ``await start(...)``.

    Callers need not know of each other: their requests share the engine's batches, whatever heads
    they read. Cancelling a call cancels its requests in the engine. Use from one event loop.

    A probe of all heads needs a prefill step with room for its whole prompt: it waits until no
    other prompt is being prefilled, and others wait for it meanwhile.

    Attributes:
        engine: vLLM's ``AsyncLLM``.
        loop: the event loop that it is used from.
    """

    def __init__(self, engine: Any, max_capture_bytes: int = MAX_CAPTURE_BYTES) -> None:
        """Use ``start``."""
        self._begin_programs(max_capture_bytes)
        self.engine = engine
        self.loop = asyncio.get_running_loop()
        self._closed = False
        self._requests = itertools.count()
        self._growing = asyncio.Lock()
        self._prefills = Gate()
        self._calls: set[asyncio.Task[Any]] = set()
        self._engines = compat.count_engines(engine.engine_core)
        self._fetchers = [Fetcher(partial(self._rpc_on, rank)) for rank in range(self._engines)]
        self._router = Router(self._engines)

    @classmethod
    async def start(
        cls,
        model: str | None = None,
        *,
        heads: Iterable[Any] | None = None,
        layers: int | Literal["auto"] | None = None,
        name: str | None = None,
        config: str | Path | None = None,
        programs: bool | None = None,
        max_capture_bytes: int = MAX_CAPTURE_BYTES,
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
        model, programs = configured(model, config, programs, engine)
        options = engine_options(
            model, chosen, layers, engine, data_parallel=True, programs=programs
        )
        arguments = compat.symbol("vllm.engine.arg_utils", "AsyncEngineArgs")
        # By its context vLLM chooses what was not given: a server's steps are of 8192 tokens and
        # 1024 sequences on large GPUs, an engine's of no known use 2048 and 128.
        context = compat.symbol("vllm.usage.usage_lib", "UsageContext").OPENAI_API_SERVER
        running = compat.symbol("vllm.v1.engine.async_llm", "AsyncLLM").from_engine_args(
            arguments(model=model, **options.engine), usage_context=context
        )
        made = cls(running, max_capture_bytes)
        try:
            await made._prepare(name or model, options, chosen)
            if config is not None:
                await made.load_program(CONFIG, config, default=True)
        except BaseException:
            await made.close()
            raise
        return made

    # ------------------------------------------------------------ the public side

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    async def capture(
        self,
        requests: Sequence[CaptureRequest],
        on_done: Callable[[], object] = lambda: None,
        *,
        lora_request: Any = None,
    ) -> list[Capture]:
        """Run all requests, in batches with everybody else's; captures in request order.

        ``on_done`` is called after each. ``lora_request`` is as in ``HookLLM.capture``, and so are
        the errors; the first cancels the other requests of the call. On a CPU, an engine with
        ``enable_lora=True`` takes captures with a LoRA request only.
        """
        requests = list(requests)
        self.check_open()
        adapters = per_prompt(lora_request, len(requests), "LoRA requests")
        params = one_token()
        asks = [Ask(r, params, a) for r, a in zip(requests, adapters, strict=True)]
        for ask in asks:
            self._check(ask)
        with self._call():
            await self._ensure_held(requests)
            return await self._in_turn(asks, on_done)

    async def probe(
        self,
        prompt: Any,
        probe: AttentionProbe,
        sampling_params: Any = None,
        *,
        lora_request: Any = None,
    ) -> tuple[Any, Capture]:
        """Generate as usual and capture: vLLM's final output, and what the probe read.

        No program runs, neither the default one: that is ``perform(probe=...)``.
        """
        self.check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        request = probed_request(prompt, probe, self._tokenizer)
        ask = Ask(request, sampling_params, lora_request)
        self._check(ask)
        with self._call():
            await self._ensure_held([request])
            return await self._captured(ask, asyncio.Event())

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
        for fetcher in (*self._fetchers, self._states_fetcher):
            await fetcher.close()
        self.engine.shutdown()

    async def __aenter__(self) -> AsyncHookLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ one request

    async def _stream(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        kwargs.setdefault("request_id", self._request_id())
        async with self._prefills.passing() as prefilled:
            self.check_open()
            with engine_alive():
                async for output in self.engine.generate(prompt, sampling_params, **kwargs):
                    prefilled()
                    yield output

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

    async def _in_turn(self, asks: list[Ask], on_done: Callable[[], object]) -> list[Capture]:
        cached = bool(self.engine.vllm_config.cache_config.enable_prefix_caching)
        captured = await in_turn(
            [partial(self._captured, ask) for ask in asks],
            tokens_to_compute([_prompt(ask) for ask in asks], cached),
            Room.of(self._session.max_num_batched_tokens, self._engines),
            on_done,
        )
        return [capture for _, capture in captured]

    async def _captured(self, ask: Ask, left_engine: asyncio.Event) -> tuple[Any, Capture]:
        """The output is the first try's: later ones only capture.

        Sets ``left_engine`` once the request is computed: fetching needs no room there.
        """
        session, request = self._session, ask.request
        output: Any = None
        result: dict[str, Any] = {}
        try:
            for attempt in range(1, TRIES + 1):
                submission = session.submission(ask, fresh=attempt > 1)
                again = ask.run if attempt > 1 else None
                with self._discarded_on_error(again):
                    rank, ended = await self._submit(submission)
                    left_engine.set()
                    output = output or ended
                    workers = await self._fetchers[rank].fetch(submission.capture_id)
                    if again is not None:  # attention without the program is another model's
                        await self._states(again, 1)
                result = merge_ranks(workers, request)
                if result.get("stale"):
                    session.leave_cache(submission)
                if "incomplete" not in result:
                    return output, session.capture(request, result, ended, attempt)
                ask = self._once_more(ask)
            return output, session.capture(request, result, output, TRIES)
        finally:
            left_engine.set()

    def _once_more(self, ask: Ask) -> Ask:
        """Only to capture; what its program reads is known from the first try."""
        run = ask.run
        if run is not None and self._conductor is not None:
            run = self._conductor.again(run)
        options = {k: v for k, v in (ask.options or {}).items() if k != "request_id"}
        return ask._replace(params=one_token(), run=run, options=options)

    async def _submit(self, submission: Submission) -> tuple[int, Any]:
        """The engine that ran the request, and its final output.

        Cancelled, vLLM aborts it, and its capture is dropped.
        """
        request, adapter = submission.request, submission.adapter
        size = len(request.prompt_token_ids)
        whole = request.probe.heads == "all"
        key = (request.prompt_token_ids[: request.probe.query_span[0]], adapter)
        router, final = self._router, None
        async with self._prefills.passing(alone=whole) as prefilled:
            if whole:
                await self._room_for(size)
            rank = router.assign(hash(key), size)
            try:
                with engine_alive():
                    async for output in self.engine.generate(
                        submission.prompt,
                        submission.params,
                        lora_request=adapter,
                        data_parallel_rank=rank if self._engines > 1 else None,
                        **{"request_id": self._request_id(), **submission.options},
                    ):
                        prefilled()
                        final = output
            except BaseException:
                if not self._closed:
                    self._fetchers[rank].discard(submission.capture_id)
                raise
            finally:
                router.release(rank, size)
        return rank, final

    async def _room_for(self, size: int) -> None:
        """Wait until a step has room for a whole prompt beside what generates.

        Nobody else enters meanwhile, so it comes; requests sent past this object are seen too.
        """
        budget = self._session.max_num_batched_tokens
        while True:
            self.check_open()
            prefilling, running = compat.in_flight(self.engine)
            if not prefilling and size + running <= budget:
                return
            await asyncio.sleep(POLL_S)

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

    async def _prepare(self, name: str, options: EngineOptions, heads: Iterable[Head]) -> None:
        vllm_config = self.engine.vllm_config
        check_running(vllm_config, data_parallel=True)
        await self._perform(self._install(vllm_config, name, options, heads, self._engines))
        self._tokenizer = self.engine.get_tokenizer()
        if asyncio.iscoroutine(self._tokenizer):
            self._tokenizer = await self._tokenizer

    async def _perform(self, steps: Generator[Call, list[Any], T]) -> T:
        try:
            call = next(steps)
            while True:
                try:
                    answers = await self._rpc(call.method, *call.arguments)
                except BaseException as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answers)
        except StopIteration as done:
            return done.value

    async def _ensure_held(self, requests: Sequence[CaptureRequest]) -> None:
        if self._session.to_hold(requests) is None:
            return
        async with self._growing:
            heads = self._session.to_hold(requests)
            if heads is not None:
                await self._perform(self._hold(heads))

    def _check(self, ask: Ask) -> None:
        self._session.check(ask.request, ask.adapter)
        self._session.check_apart(ask.adapter)

    def check_whole(self) -> None:
        """Raise UnsupportedModelError where layers were cut off: such an engine cannot generate."""
        self._session.check_whole()

    def check_open(self) -> None:
        """Raise EngineDeadError where the engine's process is known to be gone, ClosedError after
        ``close``."""
        if self._closed:
            raise ClosedError("this AsyncHookLLM is closed; start a new one.")
        if self.engine.errored:
            raise EngineDeadError("vLLM's engine process died; close this engine, start a new one.")


def _prompt(ask: Ask) -> Prompt:
    request, adapter = ask.request, ask.adapter
    apart = (
        request.probe.heads == "all" and id(ask),  # such a one does not read the cache
        adapter and adapter.lora_int_id,
        ask.run and ask.run.salt,
    )
    return Prompt(request.prompt_token_ids, request.probe.query_span[0], apart)
