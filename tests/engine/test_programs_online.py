"""Programs of many callers on AsyncHookLLM: each its own, streams, cancellation, names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import DEFAULTS
from oracle import reference_attention
from parity import assert_exact
from program_oracle import assert_states, reference_states
from program_runs import greedy, tokens
from prompts import random_request

from hook_runtime import (
    AddVector,
    AsyncHookLLM,
    Head,
    HeadOutputProbe,
    HiddenStateProbe,
    Performed,
    ProbeError,
    Program,
    ProgramError,
    ScaleHeads,
    ThreadedHookLLM,
)

pytestmark = pytest.mark.engine

DIRECTION = np.random.default_rng(0).standard_normal(192)
PROBES = (HiddenStateProbe("all", positions="all"), HeadOutputProbe(["1-1"], positions="all"))
STEERED = Program(PROBES, AddVector([1], DIRECTION, 0.7))
KNOCKED = Program(PROBES, ScaleHeads(["0-1", "2-4"], 0.0))


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def online(folder: Path) -> Iterator[ThreadedHookLLM]:
    with ThreadedHookLLM(str(folder), **{**DEFAULTS, "enforce_eager": True}) as hooked:
        yield hooked


def on_loop(online: ThreadedHookLLM, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, online._loop).result(timeout=300)


def prompt(length: int, seed: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": tokens(length, seed)}


def check(folder: Path, online: ThreadedHookLLM, program: Program, reading: Any) -> None:
    resolved = online.hooked._conductor.resolve(program)  # type: ignore[union-attr]
    computed = [*reading.prompt_token_ids, *reading.token_ids[:-1]]
    references = reference_states(folder, computed, len(reading.prompt_token_ids), resolved)
    assert_states(reading.states, references, resolved.probes)


async def last_of(stream: Any) -> Any:
    final = None
    async for output in stream:
        final = output
    return final


def test_callers_with_programs_of_their_own(online: ThreadedHookLLM, folder: Path) -> None:
    request = random_request(90, (80, 85), ((0, 30), (30, 69)), (Head(1, 0), Head(3, 4)), seed=9)

    async def all_at_once(hooked: AsyncHookLLM) -> tuple[Any, ...]:
        return await asyncio.gather(
            hooked.perform(prompt(70, 1), STEERED, greedy()),
            hooked.perform(prompt(70, 1), KNOCKED, greedy()),
            last_of(hooked.generate(prompt(70, 1), greedy())),
            hooked.perform(
                {"prompt_token_ids": list(request.prompt_token_ids)},
                Program(PROBES),
                greedy(),
                probe=request.probe,
            ),
            last_of(hooked.generate(prompt(50, 2), greedy(), program=STEERED)),
            hooked.capture([request]),
        )

    alone = on_loop(online, last_of(online.hooked.generate(prompt(70, 1), greedy())))
    steered, knocked, plain, both, stream, captures = on_loop(online, all_at_once(online.hooked))
    check(folder, online, STEERED, steered.reading)
    check(folder, online, KNOCKED, knocked.reading)
    check(folder, online, Program(PROBES), both.reading)
    check(folder, online, STEERED, online.hooked.reading(stream.request_id))
    assert plain.outputs[0].token_ids == alone.outputs[0].token_ids
    assert steered.output.outputs[0].token_ids != alone.outputs[0].token_ids
    expected = reference_attention(folder, [request])
    assert_exact([both.reading.attention], expected, [request])
    assert_exact(captures, expected, [request])


def test_programs_by_name(online: ThreadedHookLLM) -> None:
    hooked = online.hooked
    messages = [{"role": "user", "content": "Name a colour."}]

    async def rounds() -> list[Any]:
        found = [await last_of(hooked.chat(messages, greedy()))]
        await hooked.load_program("steer", STEERED, default=True)
        assert [i.name for i in hooked.list_programs()] == ["steer"]
        found.append(await last_of(hooked.chat(messages, greedy())))
        found.append(await last_of(hooked.chat(messages, greedy(), program=None)))
        hooked.unload_program("steer")
        with pytest.raises(ProbeError, match="no program 'steer'"):
            await hooked.perform(prompt(9, 1), "steer", greedy())
        return found

    plain, steered, without = (o.outputs[0].text for o in on_loop(online, rounds()))
    assert plain == without != steered


def test_cancelled_and_failed_programs_leave_nothing(online: ThreadedHookLLM, folder: Path) -> None:
    hooked = online.hooked

    async def cancelled() -> None:
        task = asyncio.create_task(hooked.perform(prompt(60, 4), STEERED, greedy(400)))
        while not (await hooked.stats())[0]["programs"]:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        stream = hooked.generate(prompt(60, 5), greedy(400), program=STEERED)
        async for _ in stream:
            break
        await stream.aclose()  # type: ignore[attr-defined]

    async def failed() -> None:
        conductor = hooked._conductor
        assert conductor is not None
        lost = Program((), AddVector([1], 3 * DIRECTION))
        conductor.loaded(conductor.load([lost]))  # the workers were never told
        with pytest.raises(ProgramError, match="does not hold the vector"):
            await hooked.perform(prompt(60, 6), lost, greedy())
        conductor.forget()

    async def settled() -> dict[str, int]:
        done: Performed = await hooked.perform(prompt(60, 7), STEERED, greedy())
        check(folder, online, STEERED, done.reading)
        await last_of(hooked.generate(prompt(5, 8), greedy(2)))
        (stats,) = await hooked.stats()
        return stats

    on_loop(online, cancelled())
    on_loop(online, failed())
    stats = on_loop(online, settled())
    assert stats["programs"] == stats["program_results"] == stats["wrapped_layers"] == 0
    assert hooked._conductor is not None
    assert not hooked._conductor._in_use


def test_from_other_threads_and_loops(online: ThreadedHookLLM, folder: Path) -> None:
    online.load_program("steer", STEERED)
    assert [info.name for info in online.list_programs()] == ["steer"]
    done = online.perform(prompt(40, 10), "steer", greedy())
    check(folder, online, STEERED, done.reading)
    again = asyncio.run(online.aperform(prompt(40, 10), "steer", greedy()))
    assert again.output.outputs[0].token_ids == done.output.outputs[0].token_ids
    online.unload_program("steer")
    with pytest.raises(ProbeError, match="no program 'steer'"):
        online.unload_program("steer")


def test_data_parallel(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request's states come from the engine of the two that served it."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments: dict[str, Any] = {**DEFAULTS, "enforce_eager": True, "data_parallel_size": 2}
    programs = [STEERED, KNOCKED] * 4

    async def all_at_once(hooked: AsyncHookLLM) -> list[Performed]:
        return await asyncio.gather(
            *(hooked.perform(prompt(60, i), p, greedy()) for i, p in enumerate(programs))
        )

    with ThreadedHookLLM(str(folder), **arguments) as hooked:
        for program, done in zip(
            programs, on_loop(hooked, all_at_once(hooked.hooked)), strict=True
        ):
            check(folder, hooked, program, done.reading)
