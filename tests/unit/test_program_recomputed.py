"""Attention that is computed once more, for requests that carry a program."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from program_calls import (
    GENERATED,
    MODEL,
    PROMPT,
    STEERED,
    answers,
    output,
    params,
    pretend_output_kinds,
)

from hook_runtime import compat
from hook_runtime.async_engine import AsyncHookLLM
from hook_runtime.desk import Plan
from hook_runtime.engine import HookLLM
from hook_runtime.errors import ProbeError, ProgramError
from hook_runtime.session import Session
from hook_runtime.specs import AttentionProbe, Head
from hook_runtime.templates import AttentionTemplate


@pytest.fixture(autouse=True)
def _kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_output_kinds(monkeypatch)


PROBE = AttentionProbe(["1-1"], (3, 4), ((0, 3),))
CAPTURED = {"heads": (Head(1, 1),), "values": np.ones((1, 3), np.float32)}


def session() -> Session:
    scheduler = SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8)
    config = SimpleNamespace(scheduler_config=scheduler, lora_config=None)
    made = Session(MODEL, config, [{"heads": [6] * 4}])
    made.held = frozenset({Head(1, 1)})
    return made


def second_fails(method: str, args: Sequence[Any], fails: bool) -> list[Any]:
    """What the workers say of the run that goes with the second computation."""
    again = method == "hook_runtime_states" and any(run_id == "p1" for run_id, _ in args[0])
    return answers(method, args, "a fault" if fails and again else None)


class Capturing(HookLLM):
    """Finds the prefix uncaptured the first time."""

    def __init__(self, fails: bool) -> None:
        self._session, self._lock, self._closed = session(), threading.RLock(), False
        self._leftover, self._leftover_runs = [], []
        self._begin_programs(1 << 20)
        self.fails = fails
        self.tries = 0

    @property
    def tokenizer(self) -> Any:
        return None

    def _submit(self, batch: Any, ordinary: Any, progress: bool) -> Any:
        self.tries += 1
        result = {"incomplete": "not captured"} if self.tries == 1 else dict(CAPTURED)
        return [output("r", GENERATED)], [result]

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return second_fails(method, args, self.fails)


class CapturingOnline(AsyncHookLLM):
    """The same, for many callers."""

    def __init__(self, fails: bool) -> None:
        super().__init__(SimpleNamespace(engine_core=None, errored=False), 1 << 20)
        self._session, self._tokenizer = session(), None
        self.fails = fails
        self.tries = 0
        self.options: list[Any] = []

    async def _submit(self, submission: Any) -> Any:
        self.tries += 1
        self.options.append(dict(submission.options))
        return 0, output("r", GENERATED if self.tries == 1 else GENERATED[:1])

    async def _rpc_on(self, rank: int, method: str, *args: Any) -> list[Any]:
        if method == "hook_runtime_take" and self.tries == 1:
            return [[{"incomplete": "not captured"}] * len(args[0])]
        if method == "hook_runtime_take":
            return [[{"heads": [[1, 1]], "values": CAPTURED["values"].tobytes()}] * len(args[0])]
        return second_fails(method, args, self.fails)


def perform_offline(fails: bool) -> Any:
    engine = Capturing(fails)
    return engine.perform([PROMPT], STEERED, params(), probes=[PROBE])[0]


def perform_online(fails: bool) -> Any:
    async def run() -> Any:
        return await CapturingOnline(fails).perform(PROMPT, STEERED, params(), probe=PROBE)

    return asyncio.run(run())


@pytest.fixture
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "count_engines", lambda _: 1)
    monkeypatch.setattr("hook_runtime.engine.one_token", params)
    monkeypatch.setattr("hook_runtime.async_engine.one_token", params)
    monkeypatch.setattr("hook_runtime.async_engine.engine_alive", contextlib.nullcontext)
    monkeypatch.setattr("hook_runtime.engine.engine_alive", contextlib.nullcontext)


@pytest.mark.usefixtures("_no_vllm")
def test_arguments_of_the_engine_go_with_attention_too() -> None:
    """As vLLM's application gives them; the id is that of the computation whose output counts."""
    plan = Plan(STEERED, AttentionTemplate(["1-1"], query=(3, 4), spans=((0, 3),)))

    async def run() -> tuple[list[Any], Any]:
        engine = CapturingOnline(False)
        engine._desk.load("reads", plan, default=False)
        how = {"request_id": "r", "priority": 3, "data_parallel_rank": None, "lora_request": None}
        (_,) = [o async for o in engine.generate(PROMPT, params(), program="reads", **how)]
        with pytest.raises(ProbeError, match="data_parallel_rank may not be given"):
            await engine.perform(PROMPT, "reads", params(), data_parallel_rank=1)
        return engine.options, engine.reading("r")

    options, reading = asyncio.run(run())
    assert options == [{"request_id": "r", "priority": 3}, {"priority": 3}]
    assert reading.attention is not None


@pytest.mark.usefixtures("_no_vllm")
@pytest.mark.parametrize("perform", [perform_offline, perform_online])
def test_attention_computed_once_more_without_its_program_never_comes_back(perform: Any) -> None:
    done = perform(False)
    assert done.reading.attention.values.tolist() == [[1, 1, 1]]
    assert done.reading.attention.recomputed
    assert done.reading.states[0].positions == (0, 6)
    with pytest.raises(ProgramError, match="a fault"):
        perform(True)
