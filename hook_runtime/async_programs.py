"""The programs of AsyncHookLLM: requests of many callers, each with its own."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .conductor import Conductor, Run, states_of, with_program, with_salt
from .config import ProgramConfig
from .desk import DEFAULT
from .errors import ProbeError
from .exchange import gives_deltas, with_whole_output
from .fetcher import Fetcher
from .hooked import Call
from .probes import States
from .program_work import Work, chat_prompt
from .programmed import Performed, Programmed, reading_of
from .programs import Program
from .session import Ask
from .specs import AttentionProbe, Capture, CaptureRequest

T = TypeVar("T")


class AsyncPrograms(Programmed):
    """What `AsyncHookLLM` does with programs; the engine itself is the subclass's."""

    def _begin_programs(self, max_capture_bytes: int) -> None:
        super()._begin_programs(max_capture_bytes)
        self._loading = asyncio.Lock()
        self._ends: dict[str, int] = {}
        self._states_fetcher = Fetcher(self._take_states)

    # ------------------------------------------------------------ the public side

    async def load_program(
        self, name: str, program: Program | ProgramConfig | str | Path, *, default: bool = False
    ) -> None:
        """As ``HookLLM.load_program``, while requests run: those under way end as they began."""
        self.check_open()
        async with self._loading:
            await self._perform(self._loaded(name, program, default))

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        *,
        program: Any = DEFAULT,
        steer: Any = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """vLLM's ``AsyncLLM.generate``, with a request id of its own where none is given.

        ``program`` and ``steer`` are as in ``HookLLM.generate``. What was read is there for
        ``analyze`` and ``reading`` once the last output has been taken; ProgramError comes then, if
        at all. Where the program has an attention probe the last output is the only one, and whole.
        """
        self.check_open()
        self._session.check_whole()
        if sampling_params is None:
            sampling_params = await self._default_params()
        (plan,) = self._desk.pick(program, 1, steer)
        if plan.empty:
            async for output in self._stream(prompt, sampling_params, **kwargs):
                yield output
            return
        if plan.attention is not None:
            done = await self.perform(prompt, program, sampling_params, steer=steer, **kwargs)
            yield done.output
            return
        conductor = await self._ready()
        work = Work.of(prompt, plan, None, sampling_params, None, self.tokenizer, conductor)
        conductor.check_sizes([work.size])
        async with self._running(work, conductor) as run:
            assert run is not None
            sent = with_salt({"prompt_token_ids": list(work.tokens)}, run)
            final = None
            deltas = gives_deltas(sampling_params)
            generated: list[int] = []
            async for output in self._stream(sent, with_program(sampling_params, run), **kwargs):
                if not deltas:
                    generated.clear()
                generated.extend(output.outputs[0].token_ids)
                if output.finished:
                    final = output  # held back until the program is known to be carried out
                else:
                    yield output
            if final is None:
                self._drop(run)
                return
            self._keep(work, final, generated, None, await self._states(run, len(generated)))
        yield final

    async def chat(
        self,
        messages: Any,
        sampling_params: Any = None,
        *,
        program: Any = DEFAULT,
        steer: Any = None,
        lora_request: Any = None,
        **template: Any,
    ) -> AsyncIterator[Any]:
        """As ``generate``, for a conversation; ``template`` goes to ``apply_chat_template``."""
        prompt = chat_prompt(messages, self.tokenizer, template)
        adapter = {} if lora_request is None else {"lora_request": lora_request}
        async for output in self.generate(
            prompt, sampling_params, program=program, steer=steer, **adapter
        ):
            yield output

    async def perform(
        self,
        prompt: Any,
        program: Any = DEFAULT,
        sampling_params: Any = None,
        *,
        steer: Any = None,
        probe: AttentionProbe | None = None,
        lora_request: Any = None,
        **options: Any,
    ) -> Performed:
        """Generate under a program: the final output, and what was read.

        Arguments and errors are those of ``HookLLM.perform``, for one prompt; ``options`` are
        further ones of vLLM's ``AsyncLLM.generate``, such as ``request_id`` and ``priority``. The
        output is whole, whatever ``sampling_params.output_kind`` says.
        """
        self.check_open()
        sampling_params = self._params_to_perform(sampling_params)
        if sampling_params is None:
            sampling_params = await self._default_params()
        (plan,) = self._desk.pick(program, 1, steer)
        with self._call():
            conductor = await self._ready()
            work = Work.of(
                prompt, plan, probe, sampling_params, lora_request, self.tokenizer, conductor
            )
            conductor.check_sizes([work.size])
            async with self._running(work, conductor) as run:
                output, capture = await self._output(work, run, options)
                generated = output.outputs[0].token_ids
                states = await self._states(run, len(generated)) if run is not None else ()
            return self._keep(work, output, generated, capture, states)

    # ------------------------------------------------------------ one request

    async def _ready(self) -> Conductor:
        if self._conductor is None:
            async with self._loading:
                return await self._perform(self._opened())
        return self._conductor

    @contextlib.asynccontextmanager
    async def _running(self, work: Work, conductor: Conductor) -> AsyncIterator[Run | None]:
        """A run of the request's program; the workers hold its vectors until it ends."""
        if work.program is None:
            yield None
            return
        run = conductor.begin(work.program, len(work.tokens))
        try:
            async with self._loading:
                await self._perform(self._sent([work.program]))
            with self._discarded_on_error(run):
                yield run
        finally:
            conductor.end_run(run)

    @contextlib.contextmanager
    def _discarded_on_error(self, run: Run | None) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if run is not None and not self._closed:
                self._drop(run)
            raise

    def _drop(self, run: Run) -> None:
        """It failed, or its outcome will not be fetched."""
        assert self._conductor is not None
        self._states_fetcher.discard(run.run_id)
        self._conductor.leave_cache(run)

    async def _output(
        self, work: Work, run: Run | None, options: dict[str, Any]
    ) -> tuple[Any, Capture | None]:
        if work.probe is not None:
            if options.pop("data_parallel_rank", None) is not None:
                raise ProbeError(
                    "data_parallel_rank may not be given where attention is read: requests with "
                    "equal beginnings go to one engine. Leave it out."
                )
            request = CaptureRequest(work.tokens, work.probe)
            ask = Ask(request, work.params, work.adapter, run, options)
            self._check(ask)
            await self._ensure_held([ask.request])
            return await self._captured(ask, asyncio.Event())
        prompt, params = work.prompt, with_whole_output(work.params)
        if run is not None:
            prompt = with_salt({"prompt_token_ids": list(work.tokens)}, run)
            params = with_program(params, run)
        final = None
        async for output in self._stream(prompt, params, lora_request=work.adapter, **options):
            final = output
        return final, None

    async def _states(self, run: Run, generated: int) -> tuple[States, ...]:
        self._ends[run.run_id] = run.end(generated)
        try:
            workers = await self._states_fetcher.fetch(run.run_id)
        finally:
            self._ends.pop(run.run_id, None)
        return states_of(workers, run, generated)

    async def _take_states(
        self, method: str, run_ids: list[str], unwanted: list[str]
    ) -> list[list[dict[str, Any]]]:
        """Of all engines: a worker of another one than the request's knows nothing of it."""
        asked = [[run_id, self._ends.get(run_id, 0)] for run_id in run_ids]
        return await self._rpc("hook_runtime_states", asked, unwanted)

    def _keep(
        self,
        work: Work,
        output: Any,
        generated: Sequence[int],
        capture: Capture | None,
        states: tuple[States, ...],
    ) -> Performed:
        prompt = work.tokens or output.prompt_token_ids or ()
        reading = reading_of(output, prompt, generated, capture, work.probe, states)
        self._desk.keep([(reading, work.analyzer)])
        return Performed(output, reading)

    # ------------------------------------------------------------ the subclass's

    _closed: bool

    @property
    @abstractmethod
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""

    @abstractmethod
    def _stream(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]: ...

    @abstractmethod
    async def _captured(self, ask: Ask, left_engine: asyncio.Event) -> tuple[Any, Capture]: ...

    @abstractmethod
    async def _ensure_held(self, requests: list[CaptureRequest]) -> None: ...

    @abstractmethod
    async def _default_params(self) -> Any: ...

    @abstractmethod
    async def _perform(self, steps: Generator[Call, list[Any], T]) -> T: ...

    @abstractmethod
    async def _rpc(self, method: str, *args: Any) -> list[Any]: ...

    @abstractmethod
    def _call(self) -> contextlib.AbstractContextManager[None]: ...

    @abstractmethod
    def _check(self, ask: Ask) -> None: ...

    @abstractmethod
    def check_open(self) -> None: ...
