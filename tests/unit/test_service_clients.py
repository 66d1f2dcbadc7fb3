"""The clients that people have, against the service: each must give our own order and scores."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from services import DOCUMENTS, QUERY, behind_socket

from core_rerank import Ranking, Reranker

MODEL = "test/fake"


@pytest.fixture(scope="module")
def url(reranker: Reranker) -> Iterator[str]:
    with behind_socket(reranker, api_keys=("key",), max_documents=50) as running:
        yield running.url


@pytest.fixture(scope="module")
def expected(reranker: Reranker) -> Ranking:
    return reranker.rerank(QUERY, DOCUMENTS)


def pairs(expected: Ranking, top_n: int | None = None) -> list[Any]:
    """(index, relevance from 0 to 1), best first."""
    return [
        (item.index, pytest.approx(1 / (1 + math.exp(-item.score)))) for item in expected[:top_n]
    ]


def nodes(scores: float | None = 0.3) -> list[Any]:
    from llama_index.core.schema import NodeWithScore, TextNode

    return [NodeWithScore(node=TextNode(text=text), score=scores) for text in DOCUMENTS]


def order(found: list[Any]) -> list[tuple[int, float]]:
    return [(DOCUMENTS.index(node.node.get_content()), node.score) for node in found]


def test_cohere_v2(url: str, expected: Ranking) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="key", base_url=url)
    answer = client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS, top_n=3)
    assert [(r.index, r.relevance_score) for r in answer.results] == pairs(expected, 3)
    assert answer.meta.tokens.input_tokens == expected.prompt_tokens
    cut = client.rerank(model=MODEL, query=QUERY, documents=[DOCUMENTS[1]], max_tokens_per_doc=3)
    assert cut.meta.warnings


def test_cohere_v2_async(url: str, expected: Ranking) -> None:
    cohere = pytest.importorskip("cohere")

    async def ask() -> list[Any]:
        client = cohere.AsyncClientV2(api_key="key", base_url=url)
        return await asyncio.gather(
            *(client.rerank(model=MODEL, query=QUERY, documents=DOCUMENTS) for _ in range(5))
        )

    for answer in asyncio.run(ask()):
        assert [(r.index, r.relevance_score) for r in answer.results] == pairs(expected)


def test_cohere_v1(url: str, expected: Ranking) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.Client(api_key="key", base_url=url)
    objects = [{"text": text} for text in DOCUMENTS]
    answer = client.rerank(
        model=MODEL, query=QUERY, documents=objects, return_documents=True, rank_fields=["text"]
    )
    assert [(r.index, r.relevance_score) for r in answer.results] == pairs(expected)
    assert answer.results[0].document.text == DOCUMENTS[expected[0].index]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"documents": []}, "BadRequestError"),
        ({"model": "other"}, "NotFoundError"),
        ({"query": " "}, "UnprocessableEntityError"),
        ({"documents": ["a"] * 51}, "ApiError"),
    ],
)
def test_cohere_raises_its_own_errors(url: str, wrong: dict[str, Any], error: str) -> None:
    cohere = pytest.importorskip("cohere")
    client = cohere.ClientV2(api_key="key", base_url=url)
    given = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS, **wrong}
    with pytest.raises(cohere.core.api_error.ApiError) as raised:
        client.rerank(**given, request_options={"max_retries": 0})
    assert type(raised.value).__name__ == error
    assert raised.value.body["message"]
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=url).rerank(
            model=MODEL, query=QUERY, documents=DOCUMENTS
        )


def test_llama_index_cohere(url: str, expected: Ranking) -> None:
    module = pytest.importorskip("llama_index.postprocessor.cohere_rerank")
    rerank = module.CohereRerank(api_key="key", base_url=url, model=MODEL, top_n=3)
    assert order(rerank.postprocess_nodes(nodes(), query_str=QUERY)) == pairs(expected, 3)


def test_llama_index_jina(url: str, expected: Ranking) -> None:
    module = pytest.importorskip("llama_index.postprocessor.jinaai_rerank")
    rerank = module.JinaRerank(api_key="key", base_url=f"{url}/v1", model=MODEL, top_n=3)
    assert order(rerank.postprocess_nodes(nodes(), query_str=QUERY)) == pairs(expected, 3)
    wrong = module.JinaRerank(api_key="key", base_url=f"{url}/v1", model="other", top_n=3)
    with pytest.raises(RuntimeError, match="'other' is not served here"):
        wrong.postprocess_nodes(nodes(), query_str=QUERY)


def test_llama_index_tei(url: str, expected: Ranking) -> None:
    module = pytest.importorskip("llama_index.postprocessor.tei_rerank")
    rerank = module.TextEmbeddingInference(base_url=url, auth_token="Bearer key", top_n=3)
    assert order(rerank.postprocess_nodes(nodes(), query_str=QUERY)) == pairs(expected, 3)


def test_langchain_cohere(url: str, expected: Ranking) -> None:
    module = pytest.importorskip("langchain_cohere")
    from langchain_core.documents import Document

    rerank = module.CohereRerank(cohere_api_key="key", base_url=url, model=MODEL, top_n=3)
    found = rerank.compress_documents([Document(text) for text in DOCUMENTS], QUERY)
    assert [
        (DOCUMENTS.index(doc.page_content), doc.metadata["relevance_score"]) for doc in found
    ] == pairs(expected, 3)


@pytest.mark.skipif(not shutil.which("curl"), reason="curl is not installed")
def test_curl(url: str, expected: Ranking) -> None:
    body = json.dumps({"query": QUERY, "texts": DOCUMENTS})
    command = ["curl", "-sS", f"{url}/rerank", "-H", "Content-Type: application/json"]
    command += ["-H", "Authorization: Bearer key", "-d", body]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert [(item["index"], item["score"]) for item in json.loads(said)] == pairs(expected)
