"""AsyncHookLLM and ThreadedHookLLM: many callers, cancellation, growing, death, data parallel."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import DEFAULTS, start_engine
from oracle import reference_attention
from parity import assert_exact
from prompts import NULL_QUERY, QUERIES, capture_request, random_request

from hook_runtime import (
    AsyncHookLLM,
    ClosedError,
    EngineDeadError,
    ProbeError,
    ShadowMemoryError,
    ThreadedHookLLM,
)
from hook_runtime.engine import HookLLM
from hook_runtime.specs import CaptureRequest, Head

pytestmark = pytest.mark.engine

Reference = Callable[[Any], list[np.ndarray]]
EAGER: dict[str, Any] = {**DEFAULTS, "enforce_eager": True}
HEADS = (Head(1, 0), Head(1, 4))
OTHER_HEADS = (Head(3, 1), Head(2, 5))


@pytest.fixture(scope="module")
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def online(folder: Path) -> Iterator[ThreadedHookLLM]:
    """A tiny llama on an event loop of its own; holds two heads at first."""
    with ThreadedHookLLM(str(folder), heads=HEADS, **EAGER) as hooked:
        yield hooked


@pytest.fixture(scope="module")
def expect(folder: Path) -> Reference:
    """What the tiny llama must give."""
    return lambda requests: reference_attention(folder, requests)


def start(online: ThreadedHookLLM, work: Coroutine[Any, Any, Any]) -> Future[Any]:
    return asyncio.run_coroutine_threadsafe(work, online._loop)


def on_loop(online: ThreadedHookLLM, work: Coroutine[Any, Any, Any]) -> Any:
    return start(online, work).result(timeout=300)


async def text_of(hooked: AsyncHookLLM, prompt: str) -> str:
    from vllm import SamplingParams

    final = None
    async for output in hooked.generate(prompt, SamplingParams(max_tokens=12, temperature=0)):
        final = output
    assert final is not None
    return final.outputs[0].text


def requests_of(online: ThreadedHookLLM, heads: Any, seed: int, count: int) -> list[CaptureRequest]:
    queries = (*QUERIES, NULL_QUERY)[:count]
    return [capture_request(online.tokenizer, q, heads, seed=seed) for q in queries]


def test_callers_with_different_heads_beside_ordinary_requests(
    online: ThreadedHookLLM, expect: Reference
) -> None:
    """The shadow grows for the second and the third caller while the first one's requests run."""
    calls = [
        requests_of(online, HEADS, 0, 4),
        requests_of(online, OTHER_HEADS, 5, 2),
        requests_of(online, (Head(0, 2),), 6, 2),
    ]
    prompts = ("The capital of France is", "2, 4, 6, 8,")
    alone = [on_loop(online, text_of(online.hooked, p)) for p in prompts]

    async def everything() -> list[Any]:
        hooked = online.hooked
        return await asyncio.gather(
            *(hooked.capture(c) for c in calls), *(text_of(hooked, p) for p in prompts)
        )

    for _ in range(2):
        results = on_loop(online, everything())
        for requests, captures in zip(calls, results, strict=False):
            assert_exact(captures, expect(requests), requests)
        assert results[len(calls) :] == alone
    assert not any(c.recomputed for captures in results[: len(calls)] for c in captures)


def test_growing_while_requests_run_computes_them_again(
    online: ThreadedHookLLM, expect: Reference
) -> None:
    slow = [random_request(900, (880, 890), ((0, 800),), HEADS[:1], seed=s) for s in range(90)]
    new = requests_of(online, (Head(3, 3),), 8, 1)

    async def both() -> Any:
        running = asyncio.ensure_future(online.hooked.capture(slow))
        await asyncio.sleep(0.2)
        assert not running.done()
        return await online.hooked.capture(new), await running

    grown, interrupted = on_loop(online, both())
    assert_exact(grown, expect(new), new)
    again = [i for i, c in enumerate(interrupted) if c.recomputed]
    assert again
    for i in (again[0], 0, 89):
        assert_exact([interrupted[i]], expect([slow[i]]), [slow[i]])


def test_cancelling_frees_everything(online: ThreadedHookLLM, expect: Reference) -> None:
    requests = [random_request(900, (880, 890), ((0, 800),), HEADS[:1], seed=s) for s in range(150)]
    for wait in (0.0, 0.02, 0.1, 0.3):
        future = start(online, online.hooked.capture(requests))
        with pytest.raises(TimeoutError):
            future.result(timeout=wait)
        assert future.cancel()

    async def idle() -> None:
        while True:
            (kept,) = await online.hooked.stats()
            if (kept["requests"], kept["results"], kept["wrapped_layers"]) == (0, 0, 0):
                return
            await asyncio.sleep(0.1)

    on_loop(online, asyncio.wait_for(idle(), timeout=60))
    (request,) = requests[:1]
    assert_exact(online.capture([request]), expect([request]), [request])


def test_a_slow_caller_does_not_hold_up_another(online: ThreadedHookLLM) -> None:
    slow = [
        random_request(900, (880, 890), ((0, 800),), HEADS[:1], seed=s) for s in range(200, 320)
    ]
    quick = random_request(40, (30, 38), ((0, 20),), HEADS[:1], seed=99)
    long_call = start(online, online.hooked.capture(slow))
    online.capture([quick])
    assert not long_call.done()
    assert len(long_call.result(timeout=300)) == len(slow)


def test_threads_share_batches(online: ThreadedHookLLM, expect: Reference) -> None:
    calls = [[r] for r in requests_of(online, HEADS, 3, 5)]
    got: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, c=c: got.__setitem__(i, online.capture(c)))
        for i, c in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, call in enumerate(calls):
        assert_exact(got[i], expect(call), call)


def test_all_heads_and_a_probe_beside_its_generation(
    online: ThreadedHookLLM, expect: Reference
) -> None:
    from vllm import SamplingParams

    whole = [random_request(90 + s, (70, 80), ((0, 60),), "all", seed=s) for s in range(3)]
    assert_exact(online.capture(whole), expect(whole), whole)
    (request,) = requests_of(online, HEADS, 1, 1)
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    params = SamplingParams(max_tokens=5, temperature=0)
    output, capture = on_loop(online, online.hooked.probe(prompt, request.probe, params))
    assert len(output.outputs[0].token_ids) == 5
    assert_exact([capture], expect([request]), [request])


def test_all_heads_beside_everything_else(
    tiny_model: Callable[[str], Path], expect: Reference
) -> None:
    """Prompts that nearly fill a step, beside long prompts and texts that are being written."""
    whole = [random_request(size, (880, 890), ((0, 800),), "all", seed=9) for size in (900, 1008)]
    fills = random_request(1023, (880, 890), ((0, 800),), "all", seed=9)
    listed = [random_request(700 + s, (650, 660), ((0, 600),), HEADS, seed=s) for s in range(12)]
    arguments = {**EAGER, "max_num_batched_tokens": 1024}
    with ThreadedHookLLM(str(tiny_model("llama")), heads=HEADS, **arguments) as online:
        hooked = online.hooked

        async def write(prompt: str, tokens: int) -> str:
            """Text; captures a prompt that fills a step while it is being written."""
            from vllm import SamplingParams

            text, captures = "", None
            params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
            async for output in hooked.generate(prompt, params):
                text = output.outputs[0].text
                if captures is None and tokens == 30:
                    captures = await hooked.capture([fills])
                    assert not captures[0].recomputed
                    assert_exact(captures, expect([fills]), [fills])
            return text

        async def watch(done: asyncio.Event) -> int:
            """Small captures one after another: how many were let through meanwhile."""
            count, small = 0, random_request(40, (30, 38), ((0, 20),), HEADS[:1], seed=99)
            while not done.is_set():
                await hooked.capture([small])
                count += 1
            return count

        async def everything() -> tuple[list[Any], list[Any], list[str], int]:
            done = asyncio.Event()
            watcher = asyncio.ensure_future(watch(done))
            texts = [write(f"{n} and {n + 1} are", 30 if n == 2 else 60) for n in range(3)]
            captures = asyncio.gather(hooked.capture(listed), hooked.capture(whole * 2))
            written = await asyncio.wait_for(asyncio.gather(*texts), 240)
            many, few = await asyncio.wait_for(captures, 240)
            done.set()
            return many, few, written, await watcher

        alone = [on_loop(online, write(f"{n} and {n + 1} are", 60)) for n in range(3)]
        many, few, written, passed = on_loop(online, everything())
        assert_exact(many, expect(listed), listed)
        assert_exact(few, expect(whole) * 2, whole * 2)
        assert not any(c.recomputed for c in (*many, *few))
        assert all(one.startswith(other) for one, other in zip(alone, written, strict=True))
        assert passed > len(whole * 2)


def test_bad_requests_are_refused_before_anything_runs(online: ThreadedHookLLM) -> None:
    good, _ = requests_of(online, HEADS, 1, 2)
    bad = random_request(1024, (1000, 1010), ((0, 9),), (Head(1, 1),))
    with pytest.raises(ProbeError, match="1024 tokens; this engine takes at most 1023"):
        online.capture([good, bad])
    with pytest.raises(ProbeError, match="head 4-0 does not exist"):
        online.capture([random_request(40, (30, 38), ((0, 20),), (Head(4, 0),))])


def test_heads_that_do_not_fit_are_refused_and_the_others_stay(
    cold_engine: HookLLM, reference: Reference, new_head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [capture_request(cold_engine.tokenizer, QUERIES[0])]
    cold_engine.capture(known)
    with monkeypatch.context() as patched:
        patched.setattr("hook_runtime.memory.MARGIN", 0.0)
        new = [capture_request(cold_engine.tokenizer, QUERIES[0], heads=(new_head,))]
        with pytest.raises(ShadowMemoryError, match=r"holding \d+ heads takes \d+ MiB .* GiB free"):
            cold_engine.capture(new)
    (again,) = cold_engine.capture(known)
    assert again.cached_tokens > 0
    assert_exact([again], reference(known), known)


def test_a_dead_engine_says_so(tiny_model: Callable[[str], Path]) -> None:
    request = random_request(60, (50, 58), ((0, 40),), (Head(1, 1),))
    arguments = EAGER
    hooked = ThreadedHookLLM(str(tiny_model("llama")), **arguments)
    try:
        hooked.capture([request])
        running = start(hooked, hooked.hooked.capture([request] * 50))
        for process in hooked.hooked.engine.engine_core.resources.engine_manager.processes:
            process.kill()
        with pytest.raises(EngineDeadError, match="start a new one"):
            running.result(timeout=60)
        with pytest.raises(EngineDeadError, match="start a new one"):
            hooked.capture([request])
        with pytest.raises(EngineDeadError):
            on_loop(hooked, hooked.hooked.check_health())
    finally:
        hooked.close()
    with pytest.raises(ClosedError):
        hooked.capture([request])


def test_a_dead_synchronous_engine_says_so(tiny_model: Callable[[str], Path]) -> None:
    request = random_request(60, (50, 58), ((0, 40),), (Head(1, 1),))
    with start_engine(tiny_model("llama"), enforce_eager=True) as engine:
        engine.capture([request])
        for process in engine.llm.llm_engine.engine_core.resources.engine_manager.processes:
            process.kill()
        with pytest.raises(EngineDeadError, match="start a new one"):
            engine.capture([request])


def test_data_parallel(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures come from both engines, and later queries find their documents where they are."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = tiny_model("llama")
    heads = (Head(3, 5), Head(0, 0), Head(2, 3))
    pairs = [
        random_request(150, rows, ((0, 60), (64, 120)), heads, seed=s)
        for s in range(6)
        for rows in ((125, 140), (125, 130))
    ]
    expected = reference_attention(folder, pairs)
    arguments: dict[str, Any] = {**EAGER, "data_parallel_size": 2}
    with ThreadedHookLLM(str(folder), heads=heads, **arguments) as hooked:
        for _ in range(2):
            captures = hooked.capture(pairs)
            assert_exact(captures, expected, pairs)
        assert all(c.cached_tokens >= 96 for c in captures)
        kept = on_loop(hooked, hooked.hooked.stats())
        waiting = start(hooked, hooked.hooked.capture(pairs * 200))
    with pytest.raises(ClosedError):  # closing ends what runs, and says so
        waiting.result(timeout=60)
    assert len(kept) == 2
    assert all(worker["recorded_blocks"] > 0 for worker in kept)
