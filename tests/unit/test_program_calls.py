"""Calls with programs, on engines that only pretend to compute: what is sent, counted and analyzed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from hook_runtime import compat
from hook_runtime.analyzers import Analyzer, Reading
from hook_runtime.async_programs import AsyncPrograms
from hook_runtime.desk import MAX_READINGS, Plan
from hook_runtime.errors import ProbeError, ProgramError
from hook_runtime.interventions import AddVector
from hook_runtime.probes import HiddenStateProbe
from hook_runtime.programs import Program
from hook_runtime.specs import ModelInfo
from hook_runtime.sync_programs import SyncPrograms

MODEL = ModelInfo("tiny", None, 4, 4, 6, 512, "float32", "cpu", "vllm")
PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
GENERATED = [7, 8, 9]
READS = Program((HiddenStateProbe([1], positions="all"),))
STEERED = Program(READS.probes, AddVector([1], np.ones(2)))


@dataclass(frozen=True)
class First(Analyzer):
    kind: ClassVar[str] = "first"

    def analyze(self, reading: Reading) -> str:
        return f"{reading.request_id} of {len(reading.states)}"


def answers(method: str, arguments: Sequence[Any], failure: str | None = None) -> list[Any]:
    """One worker's, which carries everything out."""
    if method == "hook_runtime_open":
        return [{"refusal": None, "hidden_size": 2, "head_dim": 1}]
    if method == "hook_runtime_hold":
        return [None]
    asked, _ = arguments
    return [[{"error": failure} if failure else read(end) for _, end in asked]]


def read(end: int) -> dict[str, Any]:
    values = np.arange(2 * end, dtype=np.float32).reshape(1, end, 2)
    part = {"probe": 0, "keys": [1], "positions": [0, end], "shape": [1, end, 2]}
    return {"done": end, "read": [{**part, "dtype": "float32", "data": values.tobytes()}]}


def output(name: str, ids: list[int], finished: bool = True) -> Any:
    return SimpleNamespace(
        request_id=name,
        outputs=[SimpleNamespace(token_ids=ids)],
        prompt_token_ids=PROMPT["prompt_token_ids"],
        finished=finished,
    )


# ---------------------------------------------------------------- several callers


class Online(AsyncPrograms):
    """Gives out three tokens one by one, as ``output_kind`` says."""

    def __init__(self) -> None:
        self._session: Any = SimpleNamespace(model=MODEL, check_whole=lambda: None)
        self._closed = False
        self._begin_programs(1 << 20)
        self.failure: str | None = None
        self.sent: list[Any] = []

    async def _stream(self, prompt: Any, sampling_params: Any, **kwargs: Any) -> AsyncIterator[Any]:
        self.sent.append(prompt)
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
    """vLLM's ``RequestOutputKind``, without vLLM."""
    kinds = SimpleNamespace(CUMULATIVE="cumulative", DELTA="delta")
    monkeypatch.setattr(compat, "symbol", lambda *_: kinds)


def params(kind: str = "cumulative") -> Any:
    return SimpleNamespace(n=1, extra_args=None, max_tokens=3, output_kind=kind)


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
