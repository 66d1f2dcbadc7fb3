"""What the scheduler may do to a capture: small chunks, preemption, tensor parallel, bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import start_engine
from oracle import reference_attention
from parity import assert_exact, relative_error
from prompts import HEADS, NULL_QUERY, QUERIES, capture_request, random_request

from hook_runtime.engine import HookLLM
from hook_runtime.specs import CaptureRequest, Head

pytestmark = pytest.mark.engine

Reference = Callable[[Any], list[np.ndarray]]
CHUNK = 64


@pytest.fixture(scope="module")
def chunked(smollm2_dir: Path) -> Iterator[HookLLM]:
    with start_engine(smollm2_dir, enforce_eager=True, max_num_batched_tokens=CHUNK) as engine:
        yield engine


def _rows_across_a_chunk(engine: HookLLM) -> CaptureRequest:
    """A prompt whose query rows lie on both sides of a multiple of the chunk's size."""
    for seed in range(50):
        request = capture_request(engine.tokenizer, QUERIES[3], seed=seed, documents=5)
        start, end = request.probe.query_span
        if start // CHUNK < (end - 1) // CHUNK:
            return request
    raise AssertionError("no prompt straddles a chunk: change QUERIES or FACTS")


def test_rows_across_chunks(chunked: HookLLM, reference: Reference) -> None:
    request = _rows_across_a_chunk(chunked)
    chunked.llm.reset_prefix_cache()
    for _ in range(2):
        assert_exact(chunked.capture([request]), reference([request]), [request])


@pytest.mark.parametrize("company", ["alone", "beside heads not added up"])
def test_heads_added_up(chunked: HookLLM, reference: Reference, company: str) -> None:
    """In the workers, or where others of the step want them one by one, when they are fetched."""
    whole = _rows_across_a_chunk(chunked)
    other = random_request(90, (80, 89), ((0, 30), (30, 69)), HEADS, seed=6)
    added = [replace(r, probe=replace(r.probe, sum_heads=True)) for r in (whole, other)]
    some = replace(other, probe=replace(other.probe, heads=HEADS[1:3], sum_heads=True))
    requests = added if company == "alone" else [*added, some, other]
    expected = [
        r.sum(axis=0, keepdims=True) if q.probe.sum_heads else r
        for q, r in zip(requests, reference(requests), strict=True)
    ]
    chunked.llm.reset_prefix_cache()
    for _ in range(2):
        assert_exact(chunked.capture(requests), expected, requests)


def test_more_rows_than_a_chunk_holds(chunked: HookLLM, reference: Reference) -> None:
    request = random_request(300, (70, 290), ((0, 30), (30, 69)), HEADS, seed=3)
    for _ in range(2):
        assert_exact(chunked.capture([request]), reference([request]), [request])


def test_last_chunk_of_one_token(chunked: HookLLM, reference: Reference) -> None:
    """It looks like a decode step; its row is the last of the query's."""
    length = 3 * CHUNK + 1
    requests = [
        random_request(length, (length - 5, length), ((0, 90), (90, 180)), HEADS, seed=4),
        random_request(length, (length - 1, length), ((0, length),), HEADS, seed=5),
    ]
    for request in requests:
        for _ in range(2):
            assert_exact(chunked.capture([request]), reference([request]), [request])


def test_chunks_of_several_requests_beside_generation(
    chunked: HookLLM, reference: Reference
) -> None:
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    alone = chunked.generate(["The capital of France is"], greedy)[0].outputs[0].token_ids
    requests = [
        capture_request(chunked.tokenizer, query, seed=7, documents=5)
        for query in (*QUERIES[:3], NULL_QUERY)
    ]
    prompts: list[Any] = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
    chunked.llm.reset_prefix_cache()
    probed = chunked.probe(
        ["The capital of France is", *prompts], [None, *(r.probe for r in requests)], greedy
    )
    assert_exact(probed.captures[1:], reference(requests), requests)
    assert probed.outputs[0].outputs[0].token_ids == alone


def test_preemption(smollm2_dir: Path, reference: Reference) -> None:
    """Too few cache blocks for what runs at once: requests are thrown out and start again."""
    from vllm import SamplingParams

    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 512,
        "num_gpu_blocks_override": 24,
        "max_num_batched_tokens": 512,
        "long_prefill_token_threshold": 40,
        "scheduler_reserve_full_isl": False,
        "disable_log_stats": False,
    }
    with start_engine(smollm2_dir, **settings) as engine:
        requests = [
            capture_request(engine.tokenizer, QUERIES[i % 4], seed=i, documents=6) for i in range(6)
        ]
        stories = [f"Story number {i}: once upon a time" for i in range(2)]
        long = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        alone = [engine.generate([s], long)[0].outputs[0].token_ids for s in stories]
        prompts: list[Any] = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
        before = _preemptions(engine)
        probed = engine.probe(
            [*stories, *prompts], [None] * len(stories) + [r.probe for r in requests], long
        )
        assert _preemptions(engine) > before
    captures = [c for c in probed.captures if c is not None]
    assert_exact(captures, reference(requests), requests)
    assert not any(c.recomputed for c in captures)  # followed through preemption, not thrown away
    got = [output.outputs[0].token_ids for output in probed.outputs[: len(stories)]]
    assert got == alone


def _preemptions(engine: HookLLM) -> float:
    metrics = engine.llm.get_metrics()
    return sum(m.value for m in metrics if m.name == "vllm:num_preemptions")


def test_tensor_parallel(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of both ranks, asked for in an order that is neither's."""
    # By itself vLLM wants a NUMA node for every CPU worker.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = tiny_model("llama")
    heads = (Head(3, 5), Head(0, 0), Head(3, 2), Head(1, 3), Head(0, 1))
    requests = [
        random_request(200, (170, 195), ((0, 80), (90, 160)), heads, seed=1),
        random_request(110, (70, 100), ((0, 69),), "all", seed=2),
        random_request(120, (70, 100), ((0, 69),), (Head(2, 4),), seed=3),  # on one rank only
    ]
    expected = reference_attention(folder, requests)
    with start_engine(
        folder, enforce_eager=True, tensor_parallel_size=2, max_num_batched_tokens=128
    ) as engine:
        for _ in range(2):
            captures = engine.capture(requests)
            assert_exact(captures, expected, requests)
        assert captures[1].heads == tuple(Head(i, h) for i in range(4) for h in range(6))


def test_bfloat16(smollm2_dir: Path, reference: Reference) -> None:
    """Rounding to bf16 costs what it costs transformers: the bound is twice that."""
    import torch

    with start_engine(smollm2_dir, dtype="bfloat16", enforce_eager=True) as engine:
        requests = [capture_request(engine.tokenizer, q, documents=5) for q in QUERIES[:3]]
        cold, warm = engine.capture(requests), engine.capture(requests)
    exact = reference(requests)
    rounded = reference_attention(smollm2_dir, requests, dtype=torch.bfloat16)
    allowed = max(relative_error(r, e) for r, e in zip(rounded, exact, strict=True))
    assert allowed < 0.05
    for captures in (cold, warm):
        for capture, e in zip(captures, exact, strict=True):
            assert relative_error(capture.values, e) <= 2 * allowed
