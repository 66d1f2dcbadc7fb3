"""OpenAI's own client and rerankers on one served engine."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from safetensors.numpy import save
from served import served
from services import DOCUMENTS, QUERY

pytestmark = pytest.mark.engine

TOKEN = "correct-horse-battery"
CHAT: list[Any] = [{"role": "user", "content": "Write one sentence about the Moon."}]
GREEDY: dict[str, Any] = {"model": "small", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    token = tmp_path_factory.mktemp("secret") / "admin"
    token.write_text(f"{TOKEN}\n")
    options = ["--max-model-len", "1024", "--served-model-name", "small"]
    with served("--openai", *options, "--admin-token-file", str(token)) as running:
        yield running[1]


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ranked(url: str) -> list[Any]:
    body = {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True}
    answer = httpx.post(f"{url}/v1/rerank", json=body, timeout=60)
    return [(r["index"], r["relevance_score"]) for r in answer.json()["results"]]


def streamed(client: OpenAI) -> str:
    chunks = client.chat.completions.create(messages=CHAT, stream=True, **GREEDY)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_it_lists_completes_and_streams(url: str, client: OpenAI, smollm2_dir: Path) -> None:
    listed = list(client.models.list())
    assert [model.id for model in listed][:1] == ["smollm2-135m-instruct"]
    assert {model.model_extra["root"] for model in listed if model.model_extra} == {
        "HuggingFaceTB/SmolLM2-135M-Instruct"
    }
    answer = client.chat.completions.create(messages=CHAT, **GREEDY)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert streamed(client) == text
    first, second = client.completions.create(prompt=["The sea is", "A cat"], **GREEDY).choices
    assert first.text != second.text

    # transformers, which knows nothing of us, says the same
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    ids = tokenizer("The sea is", return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(said, skip_special_tokens=True) == first.text


def test_chat_and_ranking_at_the_same_time(url: str, client: OpenAI) -> None:
    alone = ranked(url), streamed(client)
    with ThreadPoolExecutor(12) as pool:
        rankings = [pool.submit(ranked, url) for _ in range(12)]
        texts = [pool.submit(streamed, client) for _ in range(6)]
        for ranking in rankings:
            found = ranking.result()
            assert [i for i, _ in found] == [i for i, _ in alone[0]]
            assert [s for _, s in found] == pytest.approx([s for _, s in alone[0]], abs=1e-4)
        assert {text.result() for text in texts} == {alone[1]}


def test_who_stops_reading_frees_the_engine(url: str, client: OpenAI) -> None:
    with client.chat.completions.create(
        messages=CHAT, stream=True, **{**GREEDY, "max_tokens": 900}, extra_body={"ignore_eos": True}
    ) as chunks:
        next(iter(chunks))
    for _ in range(100):
        if "core_rerank_running_requests 0.0" in httpx.get(f"{url}/metrics").text:
            break
    else:
        pytest.fail("the request still runs")


def test_requests_run_the_programs_that_they_name(url: str, client: OpenAI) -> None:
    rng = np.random.default_rng(0)
    tensors = save({"away": rng.normal(size=576).astype(np.float32)})
    steer = {"type": "add_vector", "layers": [12], "vector": "away", "coefficient": 30.0}
    programs = {
        "loud": {"interventions": [steer], "safetensors": base64.b64encode(tensors).decode()},
        "knocked": {"interventions": [{"type": "scale_heads", "heads": ["3-5"], "factor": 0.0}]},
    }
    admin = {"x-admin-token": TOKEN}
    plain = streamed(client)
    for name, body in programs.items():
        put = httpx.put(f"{url}/v1/programs/{name}", json=body, headers=admin, timeout=60)
        assert put.status_code == 200, put.text

    def said(program: str | None, stream: bool) -> str:
        named = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"x-program": program} if program else {},
        )
        if stream:
            return streamed(named)
        return named.chat.completions.create(messages=CHAT, **GREEDY).choices[0].message.content

    with ThreadPoolExecutor(12) as pool:
        asked = {
            key: pool.submit(said, *key)
            for key in itertools.product([None, "loud", "knocked"], [False, True])
        }
        ranking = pool.submit(ranked, url)
        texts = {key: future.result() for key, future in asked.items()}
    assert texts[None, False] == texts[None, True] == plain
    assert texts["loud", False] == texts["loud", True]
    assert len({texts[name, True] for name in (None, "loud", "knocked")}) >= 2
    assert texts["loud", True] != plain
    assert [i for i, _ in ranking.result()] == [i for i, _ in ranked(url)]
    with pytest.raises(BadRequestError, match="leave use_beam_search out"):
        client.completions.create(
            prompt="The sea",
            **GREEDY,
            extra_body={"use_beam_search": True},
            extra_headers={"x-program": "knocked"},
        )
    deleted = httpx.delete(f"{url}/v1/programs/loud", headers=admin, timeout=60)
    assert deleted.status_code == 204
    with pytest.raises(NotFoundError, match="no program 'loud' is loaded"):
        said("loud", False)


def test_what_is_refused(url: str, client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.chat.completions.create(messages=CHAT, **{**GREEDY, "model": "other"})
    with pytest.raises(BadRequestError, match="cache_salt may not begin with"):
        client.completions.create(
            prompt="The sea", **GREEDY, extra_body={"cache_salt": "hook_runtime"}
        )
    with pytest.raises(BadRequestError):
        client.completions.create(prompt="word " * 3000, **GREEDY)
    answer = httpx.post(f"{url}/v1/chat/completions", content="{", timeout=60)
    assert answer.status_code in (400, 415, 422)
    for path in ("/tokenize", "/v1/responses", "/collective_rpc", "/v1/load_lora_adapter"):
        assert httpx.post(f"{url}{path}", json={}, timeout=60).status_code == 404
    origin = {"origin": "http://elsewhere.example"}
    listed = httpx.get(f"{url}/v1/models", headers=origin)
    assert listed.status_code == 200
    assert "access-control-allow-origin" not in listed.headers
