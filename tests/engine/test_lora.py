"""Captures of LoRA adapters equal those of the model with the adapter merged in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from engines import DEFAULTS, start_engine
from oracle import reference_attention
from parity import assert_exact
from program_oracle import assert_ran
from program_runs import greedy, run_programs, tokens
from prompts import NULL_QUERY, QUERIES, capture_request, random_request

from hook_runtime import ThreadedHookLLM, UnsupportedVLLMError
from hook_runtime.engine import HookLLM
from hook_runtime.interventions import AddVector, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program
from hook_runtime.specs import CaptureRequest, Head

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
HEADS = (Head(1, 0), Head(2, 5), Head(3, 1))


class Adapter(NamedTuple):
    """What a request is given, and the merged checkpoint that stands for it."""

    request: Any
    merged: Path


@pytest.fixture(scope="module")
def adapters(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Adapter]:
    """Two random adapters of the tiny llama."""
    from parity_table.adapters import make_adapter
    from vllm.lora.request import LoRARequest

    folder, made = tmp_path_factory.mktemp("lora"), []
    for number in (1, 2):
        adapter, merged = make_adapter(tiny_model("llama"), folder, number)
        made.append(Adapter(LoRARequest(f"adapter {number}", number, str(adapter)), merged))
    return made


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> Iterator[HookLLM]:
    with start_engine(tiny_model("llama"), enforce_eager=True, heads=HEADS, **LORA) as hooked:
        yield hooked


def pair(tokenizer: Any) -> list[CaptureRequest]:
    return [capture_request(tokenizer, query, HEADS) for query in (QUERIES[0], NULL_QUERY)]


def test_adapters_in_one_batch_are_exact_and_share_no_prefix(
    engine: HookLLM, adapters: list[Adapter], tiny_model: Callable[[str], Path]
) -> None:
    requests = pair(engine.tokenizer)
    jobs = [(request, adapter) for request in requests for adapter in adapters]
    prompts, given = [r for r, _ in jobs], [a.request for _, a in jobs]
    expected = [reference_attention(a.merged, [r])[0] for r, a in jobs]
    base = reference_attention(tiny_model("llama"), requests)
    for again in (False, True):
        captures = engine.capture(prompts, lora_request=given)
        assert_exact(captures, expected, prompts)
        assert not any(c.recomputed for c in captures)
        assert not again or all(c.cached_tokens > 0 for c in captures)
        assert_exact(engine.capture(requests), base, requests)  # without one, beside their caches
    one = engine.capture(requests, lora_request=adapters[1].request)
    assert_exact(one, [expected[1], expected[3]], requests)
    assert all(c.cached_tokens > 0 for c in one)


def test_a_first_capture_with_an_adapter_finds_no_prefix_of_the_others(
    engine: HookLLM, adapters: list[Adapter]
) -> None:
    requests = [random_request(120, (100, 110), ((0, 80),), HEADS, seed=7)]
    assert engine.capture(requests)[0].cached_tokens == 0
    for adapter in adapters:
        (capture,) = engine.capture(requests, lora_request=adapter.request)
        assert (capture.cached_tokens, capture.recomputed) == (0, False)
        assert_exact([capture], reference_attention(adapter.merged, requests), requests)


def test_a_probe_beside_the_generation_of_another_adapter(
    engine: HookLLM, adapters: list[Adapter]
) -> None:
    from vllm import SamplingParams

    (request, _) = pair(engine.tokenizer)
    prompts = ["The capital of France is", {"prompt_token_ids": list(request.prompt_token_ids)}]
    params = SamplingParams(max_tokens=6, temperature=0)
    given = [a.request for a in adapters]
    alone = engine.generate(prompts[:1], params, lora_request=given[:1])
    probed = engine.probe(prompts, [None, request.probe], params, lora_request=given)
    assert probed.outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert_exact(
        [probed.captures[1]], reference_attention(adapters[1].merged, [request]), [request]
    )


def test_programs_with_adapters(engine: HookLLM, adapters: list[Adapter]) -> None:
    """States, steered and not, are those of the model with the adapter merged in."""
    direction = np.random.default_rng(5).standard_normal(192)
    probes = (HiddenStateProbe("all", positions="all"), HeadOutputProbe(["1-2"], positions="all"))
    programs = [
        Program(probes, [AddVector([1], direction, 0.7), ScaleHeads(["2-3"], 0.0)]),
        Program(probes),
    ]
    prompts = [tokens(60, seed=1), tokens(60, seed=1)]
    given = [a.request for a in adapters]
    for one, adapter in zip(
        run_programs(engine, prompts, programs, greedy(4), lora_request=given),
        adapters,
        strict=True,
    ):
        assert_ran(adapter.merged, one, 60)


def test_on_a_cpu_requests_with_and_without_an_adapter_are_kept_apart(
    engine: HookLLM, adapters: list[Adapter]
) -> None:
    requests = pair(engine.tokenizer)
    with pytest.raises(UnsupportedVLLMError, match="in a call of their own"):
        engine.capture(requests, lora_request=[adapters[0].request, None])
    with pytest.raises(UnsupportedVLLMError, match="in a call of their own"):
        engine.probe(["a", "b"], [None, None], lora_request=[adapters[0].request, None])


def test_many_callers_with_adapters(
    adapters: list[Adapter], tiny_model: Callable[[str], Path]
) -> None:
    arguments: dict[str, Any] = {**DEFAULTS, **LORA, "enforce_eager": True}
    with ThreadedHookLLM(str(tiny_model("llama")), heads=HEADS, **arguments) as online:
        requests = pair(online.tokenizer)
        whole = [random_request(200, (180, 190), ((0, 150),), seed=3)]

        async def everything() -> list[Any]:
            calls = []
            for adapter in adapters:
                calls.append(online.acapture(requests, lora_request=adapter.request))
                calls.append(online.acapture(whole, lora_request=[adapter.request]))
            return await asyncio.gather(*calls)

        for _ in range(2):
            results = asyncio.run(everything())
            for place, adapter in enumerate(adapters):
                listed, all_heads = results[2 * place : 2 * place + 2]
                assert_exact(listed, reference_attention(adapter.merged, requests), requests)
                assert_exact(all_heads, reference_attention(adapter.merged, whole), whole)
        (request, _) = requests
        probing = online.hooked.probe(
            {"prompt_token_ids": list(request.prompt_token_ids)},
            request.probe,
            lora_request=adapters[0].request,
        )
        _, capture = asyncio.run_coroutine_threadsafe(probing, online._loop).result(120)
        assert_exact([capture], reference_attention(adapters[0].merged, [request]), [request])
        with pytest.raises(UnsupportedVLLMError, match="an engine without enable_lora"):
            online.capture(requests)
