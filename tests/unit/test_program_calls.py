"""Calls with programs, on engines that only pretend to compute: what is sent and counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from program_calls import (
    GENERATED,
    MODEL,
    PROMPT,
    READS,
    STEERED,
    answers,
    output,
    params,
    pretend_output_kinds,
)

from hook_runtime.analyzers import Analyzer, Reading
from hook_runtime.async_programs import AsyncPrograms
from hook_runtime.desk import DEFAULT, MAX_READINGS, Plan
from hook_runtime.errors import ProbeError, ProgramError
from hook_runtime.interventions import AddVector
from hook_runtime.program_state import ProgramState
from hook_runtime.programs import Program
from hook_runtime.sync_programs import SyncPrograms


@dataclass(frozen=True)
class First(Analyzer):
    kind: ClassVar[str] = "first"

    def analyze(self, reading: Reading) -> str:
        return f"{reading.request_id} of {len(reading.states)}"


# ---------------------------------------------------------------- several callers


class Online(AsyncPrograms):
    """Gives out three tokens one by one, as ``output_kind`` says."""

    def __init__(self) -> None:
        self._session: Any = SimpleNamespace(model=MODEL, check_whole=lambda: None)
        self._closed = False
        self._begin_programs(1 << 20)
        self.failure: str | None = None
        self.sent: list[Any] = []
        self.options: list[Any] = []

    async def _stream(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self.sent.append(prompt)
        self.options.append(kwargs)
        for i in range(3):
            await asyncio.sleep(0)
            ids = GENERATED[i : i + 1] if sampling_params.output_kind == "delta" else GENERATED
            yield output("r", ids[: i + 1], finished=i == 2)

    async def _perform(self, steps: Any) -> Any:
        try:
            call = next(steps)
            while True:
                call = steps.send(answers(call.method, call.arguments))
        except StopIteration as done:
            return done.value

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        return answers(method, args, self.failure)

    async def _default_params(self) -> Any:
        return params()

    async def _captured(self, ask: Any, left_engine: asyncio.Event) -> Any:
        raise AssertionError("nothing to capture")

    async def _ensure_held(self, requests: Any) -> None:
        raise AssertionError("nothing to hold")

    @property
    def tokenizer(self) -> Any:
        return None

    def _call(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _check(self, ask: Any) -> None: ...

    def check_open(self) -> None: ...


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_output_kinds(monkeypatch)


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_all_that_was_generated_is_counted(kind: str) -> None:
    async def run() -> tuple[list[Any], Any, Any]:
        engine = Online()
        streamed = [o async for o in engine.generate(PROMPT, params(kind), program=STEERED)]
        return streamed, engine.reading("r"), await engine.perform(PROMPT, STEERED, params(kind))

    streamed, reading, performed = asyncio.run(run())
    given = [o.outputs[0].token_ids for o in streamed]
    assert given == ([[7], [8], [9]] if kind == "delta" else [[7], [7, 8], [7, 8, 9]])
    assert performed.output.outputs[0].token_ids == GENERATED
    for found in (reading, performed.reading):
        assert found.token_ids == tuple(GENERATED)
        assert found.states[0].positions == (0, 6)


def test_arguments_of_the_engine_are_passed_on() -> None:
    options = {"request_id": "mine", "priority": 3}

    async def run() -> list[Any]:
        engine = Online()
        await engine.perform(PROMPT, STEERED, params(), **options)
        _ = [o async for o in engine.generate(PROMPT, params(), program=STEERED, **options)]
        return engine.options

    assert asyncio.run(run()) == [{"lora_request": None, **options}, options]


async def fail(engine: Online) -> None:
    engine.failure = "a fault"
    with pytest.raises(ProgramError, match="a fault"):
        await engine.perform(PROMPT, STEERED, params())


async def fail_streaming(engine: Online) -> None:
    engine.failure = "a fault"
    with pytest.raises(ProgramError, match="a fault"):
        _ = [o async for o in engine.generate(PROMPT, params(), program=STEERED)]


async def cancel(engine: Online) -> None:
    task = asyncio.create_task(engine.perform(PROMPT, STEERED, params()))
    while not engine.sent:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def leave(engine: Online) -> None:
    stream: Any = engine.generate(PROMPT, params(), program=STEERED)
    await anext(stream)
    await stream.aclose()


async def end(engine: Online) -> None:
    """Nobody needs to ask for more once the last output is there."""
    stream: Any = engine.generate(PROMPT, params(), program=STEERED)
    while not (await anext(stream)).finished:
        pass
    await stream.aclose()


@pytest.mark.parametrize(
    ("how", "left"),
    [(fail, True), (fail_streaming, True), (cancel, True), (leave, True), (end, False)],
)
def test_what_an_unknown_outcome_left_in_the_cache_is_left(how: Any, left: bool) -> None:
    async def run() -> list[str]:
        engine = Online()
        await how(engine)
        engine.failure = None
        await engine.perform(PROMPT, STEERED, params())
        await engine.perform(PROMPT, STEERED, params())
        assert engine._conductor is not None
        assert not engine._conductor._in_use
        return [prompt["cache_salt"] for prompt in engine.sent]

    before, after, again = asyncio.run(run())
    assert (before != after) is left
    assert after == again


# ---------------------------------------------------------------- one caller


class Offline(SyncPrograms):
    """Counts what is in the engine at once, and the adapters that come with it."""

    def __init__(self) -> None:
        self._session: Any = SimpleNamespace(model=MODEL, check_whole=lambda: None)
        self._lock = threading.RLock()
        self._leftover_runs = []
        self._begin_programs(1 << 30)
        self.batches: list[int] = []
        self.sent: list[list[Program]] = []
        self.adapters: list[Any] = []
        self.count = 0

    @property
    def tokenizer(self) -> Any:
        def encode(text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

        encode.apply_chat_template = lambda messages, **_: str(messages)  # type: ignore[attr-defined]
        return encode

    def _generate(self, prompts: Any, sampling_params: Any, **kwargs: Any) -> list[Any]:
        self.adapters.append(kwargs["lora_request"])
        return [output("plain", GENERATED) for _ in prompts]

    def _probe(
        self, prompts: Any, probes: Any, params: Any, adapters: Any, runs: Any, progress: bool
    ) -> Any:
        self.batches.append(len(runs))
        self.sent.append([run.program for run in runs.values()])
        self.adapters.extend(adapters)
        outputs = [output(f"r{self.count + i}", GENERATED[:1]) for i in range(len(prompts))]
        self.count += len(prompts)
        return SimpleNamespace(outputs=outputs, captures=[None] * len(prompts))

    def _perform(self, steps: Any) -> Any:
        try:
            call = next(steps)
            while True:
                call = steps.send(answers(call.method, call.arguments))
        except StopIteration as done:
            return done.value

    def _check_open(self) -> None: ...


def test_more_prompts_than_readings_are_kept() -> None:
    """The engine's batches are bounded too: workers keep only so many results."""
    engine = Offline()
    engine._desk.load("read", Plan(READS, None, First()), False)
    count = MAX_READINGS + 1
    found = engine.generate([PROMPT] * count, params(), program="read", analyze=True)
    assert found.analyses == [f"r{i} of 1" for i in range(count)]
    assert [o.request_id for o in found.outputs] == [f"r{i}" for i in range(count)]
    assert engine.batches == [8192, count - 8192]
    with pytest.raises(ProbeError, match="nothing is known"):
        engine.reading("r0")


def test_an_analyzer_of_nothing() -> None:
    engine = Offline()
    engine._desk.load("none", Plan(analyzer=First()), False)
    with pytest.raises(ProbeError, match="reads nothing"):
        engine.generate([PROMPT], params(), program="none", analyze=True)


@pytest.mark.parametrize("program", [None, READS])
def test_chat_passes_its_adapter_on(program: Program | None) -> None:
    engine = Offline()
    messages, adapter = [{"role": "user", "content": "x"}], object()
    engine.chat(messages, params(), program=program, lora_request=adapter)
    assert engine.adapters == [adapter]


def test_a_cancelled_hold_leaves_no_vectors_for_ever() -> None:
    """The next one says what to keep; the worker drops the rest."""
    engine = Online()
    held: dict[str, Any] = {}
    lost = True

    async def rpc(steps: Any) -> Any:
        nonlocal lost
        call = next(steps)
        with contextlib.suppress(StopIteration):
            while True:
                if call.method != "hook_runtime_hold":
                    call = steps.send(answers(call.method, call.arguments))
                    continue
                ProgramState.hold(worker, *call.arguments)
                if lost:
                    lost = False
                    steps.throw(asyncio.CancelledError())
                call = steps.send([None])

    worker: Any = SimpleNamespace(_vectors=held, _tensors={}, _programs={}, device="cpu")
    programs = [Program((), AddVector([1], np.full(2, i))) for i in (1, 2)]
    engine._perform = rpc  # type: ignore[method-assign, assignment]

    async def run() -> None:
        await engine._perform(engine._opened())
        with pytest.raises(asyncio.CancelledError):
            await engine._perform(engine._sent(programs[:1]))
        assert set(held) == set(programs[0].vectors)
        await engine._perform(engine._sent(programs[1:]))
        assert set(held) == set(programs[1].vectors)

    asyncio.run(run())


# ---------------------------------------------------------------- steering


TURN = AddVector([2], np.ones(2), 4)


def test_steering_comes_after_the_program() -> None:
    engine = Offline()
    engine._desk.load("default", Plan(STEERED), True)
    both = Program(STEERED.probes, (*STEERED.interventions, TURN))
    steer = [TURN, None, Program(READS.probes, TURN)]
    assert [plan.program for plan in engine._desk.pick(DEFAULT, 3, steer)] == [
        both,
        STEERED,
        Program((*STEERED.probes, *READS.probes), both.interventions),
    ]
    engine.generate([PROMPT] * 3, params(), steer=[TURN, None, TURN])
    engine.chat([{"role": "user", "content": "x"}], params(), program=None, steer=TURN)
    sent = [program for batch in engine.sent for program in batch]
    assert sent == [both, STEERED, both, Program((), TURN)]


def test_steering_of_a_stream() -> None:
    async def run() -> Any:
        engine = Online()
        async for _ in engine.generate(PROMPT, params(), steer=Program(READS.probes, TURN)):
            pass
        _ = [o async for o in engine.generate(PROMPT, params())]
        return engine.sent, engine.reading("r")

    (steered, plain), reading = asyncio.run(run())
    assert steered["cache_salt"]
    assert "cache_salt" not in plain
    assert len(reading.states) == 1


@pytest.mark.parametrize(
    ("steer", "message"),
    [(4, "projected"), ("lower", "must be an intervention"), ([TURN], "2 prompts but 1 of steer")],
)
def test_what_is_no_steering(steer: Any, message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        Offline().generate([PROMPT] * 2, params(), steer=steer)
