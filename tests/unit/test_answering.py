"""Reranker.from_llm and the prompt that asks the same model for an answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_backend import FakeBackend, SharedFakeBackend

from core_rerank import InjectionDetector, PromptError, Reranker
from hook_runtime import BridgedHookLLM
from hook_runtime.specs import Capture, CaptureRequest, ModelInfo

DOCUMENTS = ["Bread rises.", "  ", "The Moon causes tides.", "A cat sat."]
QUERY = "What causes tides?"
HEADS = ["1-2", "0-1"]


class GeneratingFake(FakeBackend):
    cache_salt = "captures/7"


@pytest.fixture
def reranker(smollm2_tokenizer: Any) -> Reranker:
    return Reranker.from_llm(GeneratingFake(smollm2_tokenizer), heads=HEADS, window="all")


def common(one: Any, two: Any) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, two, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def test_the_prompt_begins_with_the_ranked_documents(
    reranker: Reranker, smollm2_tokenizer: Any
) -> None:
    ranking = reranker.rerank(QUERY, DOCUMENTS)
    (asked,) = reranker.backend.batches[0][:1]  # type: ignore[attr-defined]
    prompt = reranker.answer_prompt(QUERY, DOCUMENTS, relevant=[r.index for r in ranking[:2]])
    assert prompt["cache_salt"] == "captures/7"
    ids = prompt["prompt_token_ids"]
    last = asked.probe.spans[-1][1]
    assert common(ids, asked.prompt_token_ids) >= last
    text = smollm2_tokenizer.decode(ids)
    assert "[document 2] The Moon causes tides." in text  # the blank one has no label
    labels = {0: 1, 2: 2, 3: 3}
    named = ", ".join(f"[document {labels[r.index]}]" for r in ranking[:2])
    assert f"most relevant of them: {named}.\n\nQuestion: {QUERY}" in text
    assert text.endswith("assistant\n")


def test_without_hints_none_are_named(reranker: Reranker, smollm2_tokenizer: Any) -> None:
    prompt = reranker.answer_prompt(QUERY, DOCUMENTS)
    assert "relevant" not in smollm2_tokenizer.decode(prompt["prompt_token_ids"])


def test_what_it_refuses(reranker: Reranker, smollm2_tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="relevant names document 4, but there are 4"):
        reranker.answer_prompt(QUERY, DOCUMENTS, relevant=[4])
    with pytest.raises(ValueError, match="no document with text"):
        reranker.answer_prompt(QUERY, [" "])
    plain = Reranker(backend=FakeBackend(smollm2_tokenizer), heads=HEADS)
    with pytest.raises(TypeError, match="FakeBackend generates no text"):
        plain.answer_prompt(QUERY, DOCUMENTS)
    with pytest.raises(TypeError, match="takes a running HookLLM or AsyncHookLLM, not 'smol'"):
        Reranker.from_llm("smol")


@pytest.mark.parametrize(("limit", "room"), [(512, 256), (1024, 256), (1024, 1), (2048, 900)])
def test_what_could_be_ranked_can_be_answered_from(
    smollm2_tokenizer: Any, limit: int, room: int
) -> None:
    """Six long documents fill the ranking's prompt; the one for an answer leaves room for it."""
    backend = GeneratingFake(smollm2_tokenizer, max_model_len=limit)
    reranker = Reranker.from_llm(backend, heads=HEADS, window="all")
    documents = [f"Number {i}. " + "It tells of the moon and the sea. " * 80 for i in range(6)]
    reranker.rerank(QUERY, documents)
    prompt = reranker.answer_prompt(QUERY, documents, relevant=[1, 2], room=room)
    assert limit - room - 12 <= len(prompt["prompt_token_ids"]) <= limit - room


def test_a_room_that_the_documents_cannot_leave(smollm2_tokenizer: Any) -> None:
    backend = GeneratingFake(smollm2_tokenizer, max_model_len=512)
    reranker = Reranker.from_llm(backend, heads=HEADS, window="all")
    with pytest.raises(PromptError, match="do not fit in one prompt"):
        reranker.answer_prompt(QUERY, ["word " * 400] * 6, room=400)
    with pytest.raises(ValueError, match="room must be a whole number from 1, not 0"):
        reranker.answer_prompt(QUERY, DOCUMENTS, room=0)


def test_an_engine_of_an_event_loop_is_no_backend_by_itself(smollm2_tokenizer: Any) -> None:
    class Awaited(FakeBackend):
        async def capture(self, requests: Any, **_: Any) -> Any:  # type: ignore[override]
            return []

    told = "captures of Awaited are awaited: give Reranker"
    with pytest.raises(TypeError, match=told):
        Reranker(backend=Awaited(smollm2_tokenizer))
    with pytest.raises(TypeError, match=told):
        InjectionDetector(Awaited(smollm2_tokenizer))


class OneLoop:
    """What a bridge needs of an AsyncHookLLM, on the loop of the test."""

    def __init__(self, fake: SharedFakeBackend) -> None:
        self.loop = asyncio.get_running_loop()
        self.model: ModelInfo = fake.model
        self.tokenizer = fake.tokenizer
        self.cache_salt = "s"
        self._fake = fake

    def check_open(self) -> None:
        """Open."""

    async def capture(
        self, requests: list[CaptureRequest], on_done: Any = None, *, lora_request: Any = None
    ) -> list[Capture]:
        assert asyncio.get_running_loop() is self.loop
        return await self._fake.acapture(requests)


def test_an_engine_of_the_callers_loop(smollm2_tokenizer: Any) -> None:
    async def check() -> None:
        bridge = BridgedHookLLM(OneLoop(SharedFakeBackend(smollm2_tokenizer)))
        reranker = Reranker.from_llm(bridge, heads=HEADS)
        assert reranker.shares_batches
        here = await reranker.arerank(QUERY, DOCUMENTS)
        threads = await asyncio.to_thread(reranker.rerank, QUERY, DOCUMENTS)
        assert [(r.index, r.score) for r in here] == [(r.index, r.score) for r in threads]
        with pytest.raises(RuntimeError, match="wait for ever: await"):
            reranker.rerank("another query", DOCUMENTS)
        reranker.close()
        bridge.close()
        bridge.check_health()

    asyncio.run(check())
