"""Each format of the service: what goes in, what comes out, and what a mistake is told."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

import httpx
import numpy as np
import pytest
from services import DOCUMENTS, QUERY, call, fake_reranker, in_process

from core_rerank import Reranker
from core_rerank.service.responses import CohereResult, TEIResult

ORDER = [1, 3]  # the two documents about tides, in either order


def post(reranker: Reranker, path: str, body: Any, **settings: Any) -> httpx.Response:
    return call(reranker, "POST", path, body, **settings)


def logistic(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def test_cohere_v2(reranker: Reranker) -> None:
    expected = reranker.rerank(QUERY, DOCUMENTS, top_n=3)
    body = {"model": "test/fake", "query": QUERY, "documents": DOCUMENTS, "top_n": 3}
    response = post(reranker, "/v2/rerank", body)
    assert response.status_code == 200
    answer = response.json()
    assert answer["results"] == [
        {"index": item.index, "relevance_score": pytest.approx(logistic(item.score))}
        for item in expected
    ]
    assert set(answer) == {"id", "results", "meta"}
    assert answer["id"] == response.headers["x-request-id"]
    assert answer["meta"] == {
        "api_version": {"version": "2"},
        "billed_units": {"search_units": 1},
        "tokens": {"input_tokens": expected.prompt_tokens, "output_tokens": 0},
    }
    assert expected.prompt_tokens > 4 * 30


def test_cohere_v2_cuts_documents_and_says_so(reranker: Reranker) -> None:
    documents = [DOCUMENTS[1] * 30, "short"]
    body = {"model": "test/fake", "query": QUERY, "documents": documents}
    cut = post(reranker, "/v2/rerank", {**body, "max_tokens_per_doc": 5}).json()
    assert cut["meta"]["warnings"] == ["read only the beginning of 1 documents (index 0)"]
    more = post(reranker, "/v2/rerank", {**body, "max_tokens_per_doc": 4096}).json()
    assert more["meta"]["warnings"] == ["max_tokens_per_doc is at most 512 here"]
    assert cut["meta"]["tokens"]["input_tokens"] < more["meta"]["tokens"]["input_tokens"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_jina_and_cohere_v1(reranker: Reranker, path: str) -> None:
    expected = reranker.rerank(QUERY, DOCUMENTS)
    documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    body = {"query": QUERY, "documents": documents, "model": "test/fake"}
    answer = post(reranker, path, body).json()
    assert answer["object"] == "list"
    assert answer["model"] == "test/fake"
    tokens = expected.prompt_tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert answer["results"] == [
        {
            "index": item.index,
            "relevance_score": pytest.approx(logistic(item.score)),
            "document": {"text": DOCUMENTS[item.index]},
        }
        for item in expected
    ]
    quiet = {**body, "return_documents": False, "raw_scores": True, "top_n": 2}
    assert post(reranker, path, quiet).json()["results"] == [
        {"index": item.index, "relevance_score": pytest.approx(item.score)} for item in expected[:2]
    ]
    assert len(post(reranker, path, {**body, "top_n": 0}).json()["results"]) == 4


def test_rank_fields_of_object_documents(reranker: Reranker) -> None:
    documents = [{"title": "Tides", "body": "causes ocean tides", "year": None}, {"body": "bread"}]
    body = {"query": QUERY, "documents": documents, "rank_fields": ["title", "body"]}
    answer = post(reranker, "/v1/rerank", body).json()
    assert [r["document"]["text"] for r in answer["results"]] == [
        "title: Tides\nbody: causes ocean tides",
        "bread",
    ]


def test_tei_gives_a_bare_array(reranker: Reranker) -> None:
    expected = reranker.rerank(QUERY, DOCUMENTS)
    answer = post(reranker, "/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    assert answer == [
        {"index": item.index, "score": pytest.approx(logistic(item.score))} for item in expected
    ]
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True, "return_text": True}
    assert post(reranker, "/rerank", body).json() == [
        {"index": i.index, "score": pytest.approx(i.score), "text": DOCUMENTS[i.index]}
        for i in expected
    ]


def test_tei_refuses_to_cut_when_told_not_to(reranker: Reranker) -> None:
    body = {"query": QUERY, "texts": ["short", "moon " * 600]}
    assert post(reranker, "/rerank", body).status_code == 200
    assert post(reranker, "/rerank", {**body, "truncate": None}).status_code == 200
    refused = post(reranker, "/rerank", {**body, "truncate": False})
    assert refused.status_code == 422
    assert refused.json()["field"] == "texts[1]"


@pytest.mark.parametrize(
    ("left", "right"),
    [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")],
)
def test_score_keeps_the_order_given(reranker: Reranker, left: str, right: str) -> None:
    expected = {item.index: item.score for item in reranker.rerank(QUERY, DOCUMENTS)}
    body = {left: QUERY, right: DOCUMENTS}
    answer = post(reranker, "/score", body).json()
    assert answer["id"].startswith("embd-")
    assert answer["data"] == [
        {"index": i, "object": "score", "score": pytest.approx(logistic(expected[i]))}
        for i in range(4)
    ]
    raw = post(reranker, "/v1/score", {**body, "use_activation": False}).json()
    assert [item["score"] for item in raw["data"]] == [pytest.approx(expected[i]) for i in range(4)]


def test_score_of_pairs_and_of_one(reranker: Reranker) -> None:
    queries = [QUERY, "a cat"]
    body = {"text_1": queries, "text_2": DOCUMENTS[1:3], "use_activation": False}
    scores = [item["score"] for item in post(reranker, "/score", body).json()["data"]]
    expected = [
        reranker.rerank(q, [d])[0].score for q, d in zip(queries, DOCUMENTS[1:3], strict=True)
    ]
    assert scores == pytest.approx(expected)
    one = post(reranker, "/score", {"text_1": QUERY, "text_2": DOCUMENTS[1]}).json()
    assert len(one["data"]) == 1


def test_explain_is_the_ranking_with_its_tokens(reranker: Reranker) -> None:
    body = {"query": QUERY, "documents": [{"text": DOCUMENTS[1], "title": "Tides"}, "🌊 wave"]}
    response = post(reranker, "/v1/explain", body)
    answer = response.json()
    assert answer["id"] == response.headers["x-request-id"]
    first = answer["documents"][0]
    assert (first["title"], first["text"], first["index"]) == ("Tides", DOCUMENTS[1], 0)
    text = f"Tides\n{DOCUMENTS[1]}"
    assert all(t["text"] == text[t["start"] : t["end"]] for t in first["token_scores"])
    kept = sum(t["score"] for t in first["token_scores"] if t["kept"])
    assert first["score"] == pytest.approx(kept)


def test_explain_by_head_is_bounded(reranker: Reranker, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"query": QUERY, "documents": DOCUMENTS, "by_head": True}
    answer = post(reranker, "/v1/explain", body)
    expected = reranker.rerank(QUERY, DOCUMENTS, explain="heads")
    found = [{h: tuple(s) for h, s in d["head_scores"].items()} for d in answer.json()["documents"]]
    assert found == [item.head_scores for item in expected]
    numbers = len(DOCUMENTS) * 2 * 512  # documents, heads, tokens
    monkeypatch.setattr("core_rerank.service.routes.MAX_HEAD_NUMBERS", numbers - 1)
    refused = post(reranker, "/v1/explain", body)
    assert refused.status_code == 413
    assert refused.json()["field"] == "by_head"
    assert "2 heads for 4 documents of up to 512 tokens" in refused.json()["message"]
    assert post(reranker, "/v1/explain", {**body, "max_tokens_per_doc": 100}).status_code == 200


def test_blank_and_equal_documents_keep_their_places(reranker: Reranker) -> None:
    body = {"query": QUERY, "documents": ["", "tides", "tides", "bread"], "raw_scores": True}
    results = post(reranker, "/v1/rerank", body).json()["results"]
    assert [r["index"] for r in results] == [1, 2, 3, 0]
    assert results[3]["relevance_score"] <= 0


def test_a_score_of_zero_is_in_the_answer(smollm2_tokenizer: Any) -> None:
    def nothing(request: Any, head: Any) -> np.ndarray:
        return np.zeros(request.probe.num_columns)

    reranker, _ = fake_reranker(smollm2_tokenizer, attention=nothing)
    body = {"query": QUERY, "texts": ["one"], "raw_scores": True}
    assert post(reranker, "/rerank", body).json() == [{"index": 0, "score": 0.0}]


GOOD = {"model": "test/fake", "query": QUERY, "documents": ["a", "b"]}
MISTAKES = [
    ("/v2/rerank", {"query": QUERY, "documents": ["a"]}, 422, "model", "missing"),
    ("/v2/rerank", {**GOOD, "model": "rerank-v3.5"}, 404, "model", "rerank-v3.5.*test/fake"),
    ("/v2/rerank", {**GOOD, "query": "  "}, 422, "query", "blank"),
    ("/v2/rerank", {**GOOD, "query": None}, 422, "query", "string"),
    ("/v2/rerank", {**GOOD, "documents": None}, 422, "documents", "list"),
    ("/rerank", {"query": QUERY, "texts": None}, 422, "documents", "missing"),
    ("/v2/rerank", {**GOOD, "query": 3}, 422, "query", "string"),
    ("/v2/rerank", {**GOOD, "query": "\ud800"}, 422, "query", "surrogate"),
    ("/v2/rerank", {**GOOD, "documents": {"text": "a"}}, 422, "documents", "list"),
    ("/v2/rerank", {**GOOD, "documents": "a"}, 422, "documents", "list"),
    ("/v2/rerank", {**GOOD, "documents": ["a", 5]}, 422, "documents[1]", "is int"),
    ("/v2/rerank", {**GOOD, "documents": ["a", None]}, 422, "documents[1]", "is null"),
    ("/v2/rerank", {**GOOD, "documents": ["\ud800"]}, 422, "documents[0]", "surrogate"),
    ("/v2/rerank", {**GOOD, "documents": [{"image": "x"}]}, 422, "documents[0]", "text"),
    ("/v2/rerank", {**GOOD, "documents": [{"text": 1}]}, 422, "documents[0].text", "is int"),
    ("/v2/rerank", {**GOOD, "documents": []}, 400, "documents", "empty"),
    ("/v2/rerank", {**GOOD, "top_n": 0}, 422, "top_n", "greater than"),
    ("/v2/rerank", {**GOOD, "top_n": True}, 422, "top_n", "integer"),
    ("/v2/rerank", {**GOOD, "top_n": "3"}, 422, "top_n", "integer"),
    ("/v2/rerank", {**GOOD, "top_n": 2.5}, 422, "top_n", "integer"),
    ("/v2/rerank", {**GOOD, "priority": -1}, 422, "priority", "greater than"),
    ("/v2/rerank", [1, 2], 422, "body", "dictionary"),
    ("/v1/rerank", {**GOOD, "documents": []}, 422, "documents", "empty"),
    ("/v1/rerank", {**GOOD, "top_n": -1}, 422, "top_n", "greater than"),
    ("/v1/rerank", {**GOOD, "rank_fields": ["x"], "documents": [{"a": "b"}]}, 422,
     "documents[0]", "rank_fields"),
    ("/rerank", {"query": QUERY, "documents": []}, 422, "documents", "empty"),
    ("/rerank", {"query": QUERY, "texts": []}, 400, "texts", "empty"),
    ("/rerank", {"query": QUERY, "texts": ["a", 1]}, 422, "texts[1]", "string"),
    ("/rerank", {"query": QUERY, "texts": ["a", "\ud800"]}, 422, "texts[1]", "surrogate"),
    ("/rerank", {"query": QUERY, "texts": ["a"], "documents": ["a"]}, 422, "body", "either"),
    ("/rerank", {"query": QUERY}, 422, "documents", "missing"),
    ("/rerank", {"query": "", "texts": ["a"]}, 422, "query", "blank"),
    ("/rerank", {"query": QUERY, "texts": ["a"], "truncation_direction": "Left"}, 422,
     "truncation_direction", "Right"),
    ("/score", {"text_1": [QUERY, QUERY], "text_2": ["a", "b", "c"]}, 422, "body",
     r"^body has 2 queries \(text_1\) for 3 documents \(text_2\): give one query"),
    ("/score", {"text_1": QUERY, "text_2": []}, 400, "documents", "empty"),
    ("/score", {"text_1": " ", "text_2": ["a"]}, 422, "body", "^body has a blank query"),
    ("/score", {"text_1": None, "text_2": ["a"]}, 422, "queries", "missing"),
    ("/score", {"text_1": QUERY}, 422, "documents", "missing"),
    ("/score", {"text_1": QUERY, "text_2": ["a", 1]}, 422, "text_2[1]", "string"),
    ("/v2/rerank", {**GOOD, "screen": True}, 422, "screen", "Start it with --screen"),
    ("/v1/rerank", {**GOOD, "screen": "drop"}, 422, "screen", "does not screen"),
    ("/v1/explain", {**GOOD, "screen": "flag"}, 422, "screen", "does not screen"),
    ("/v1/rerank", {**GOOD, "screen": "delete"}, 422, "screen", "'flag' or 'drop'"),
    ("/rerank", {"query": QUERY, "texts": ["a"], "screen": True}, 422, "screen", "/v1/rerank"),
    ("/score", {"text_1": QUERY, "text_2": "a", "screen": "drop"}, 422, "screen", "/v1/rerank"),
    ("/v1/explain", {"query": QUERY, "documents": [{"text": "a", "title": 1}]}, 422,
     "documents[0].title", "is int"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "field", "told"), MISTAKES)
def test_a_mistake_is_named(
    reranker: Reranker, path: str, body: Any, status: int, field: str, told: str
) -> None:
    response = post(reranker, path, body)
    answer = response.json()
    assert response.status_code == status, answer
    assert answer["field"].startswith(field), answer
    assert answer["message"] == answer["detail"] == answer["error"]
    assert re.search(told, answer["message"]), answer
    assert len(answer["message"]) < 300


def test_tei_names_the_kind_of_error(reranker: Reranker) -> None:
    empty = post(reranker, "/rerank", {"query": QUERY, "texts": []})
    assert empty.json()["error_type"] == "Empty"
    assert post(reranker, "/rerank", {"query": 1, "texts": []}).json()["error_type"] == "Validation"


def test_a_query_that_does_not_fit_is_the_callers_mistake(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, max_model_len=200)
    response = post(reranker, "/rerank", {"query": "moon " * 500, "texts": ["a"]})
    assert response.status_code == 422
    assert "max_model_len" in response.json()["error"]


def test_nan_is_an_error_and_never_written(smollm2_tokenizer: Any) -> None:
    def nan(request: Any, head: Any) -> np.ndarray:
        return np.full(request.probe.num_columns, np.nan)

    reranker, _ = fake_reranker(smollm2_tokenizer, attention=nan)
    tei = post(reranker, "/rerank", {"query": QUERY, "texts": ["a"]})
    assert (tei.status_code, tei.json()["error_type"]) == (424, "Backend")
    cohere = post(reranker, "/v2/rerank", GOOD)
    assert cohere.status_code == 500
    assert "not finite" in cohere.json()["message"]
    assert "NaN" not in tei.text + cohere.text


def test_what_is_no_json(reranker: Reranker) -> None:
    async def ask() -> list[httpx.Response]:
        async with in_process(reranker) as client:
            json_type = {"content-type": "application/json"}
            bodies = [b"{", b"", b"\xff\xfe", b"[" * 100_000, b'{"query": NaN}']
            return [
                await client.post("/v2/rerank", content=b, headers=json_type) for b in bodies
            ] + [await client.post("/v2/rerank", content=json.dumps(GOOD))]

    responses = asyncio.run(ask())
    assert all(400 <= response.status_code < 500 for response in responses)
    assert responses[0].json() | {"id": ""} == {
        "id": "",
        "message": "the body is not JSON.",
        "detail": "the body is not JSON.",
        "error": "the body is not JSON.",
        "error_type": "Validation",
        "field": "body",
    }
    assert "Traceback" not in "".join(response.text for response in responses)


@pytest.mark.parametrize("path", ["/v2/rerank", "/v1/rerank", "/rerank", "/score", "/v1/explain"])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_of_another_type_is_415(reranker: Reranker, path: str, kind: str | None) -> None:
    async def ask(kind: str | None) -> httpx.Response:
        async with in_process(reranker) as client:
            headers = {} if kind is None else {"content-type": kind}
            body = {**GOOD, "queries": QUERY}
            return await client.post(path, content=json.dumps(body), headers=headers)

    refused = asyncio.run(ask(kind))
    assert refused.status_code == 415
    assert refused.json()["message"].endswith("send Content-Type: application/json.")
    assert (kind or "no Content-Type") in refused.json()["message"]
    assert refused.json()["field"] == "Content-Type"
    for good in ("Application/JSON; charset=utf-8", "application/vnd.api+json"):
        assert asyncio.run(ask(good)).status_code == 200


@pytest.mark.parametrize(
    ("path", "needed", "optional"),
    [
        ("/v2/rerank", {**GOOD}, ["top_n", "max_tokens_per_doc", "priority"]),
        ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS},
         ["model", "top_n", "return_documents", "rank_fields", "max_tokens_per_doc", "raw_scores",
          "priority"]),
        ("/rerank", {"query": QUERY, "documents": DOCUMENTS}, ["texts", "return_documents"]),
        ("/rerank", {"query": QUERY, "texts": DOCUMENTS},
         ["documents", "raw_scores", "return_text", "truncate", "truncation_direction",
          "priority"]),
        ("/score", {"text_1": QUERY, "text_2": DOCUMENTS},
         ["queries", "items", "model", "use_activation", "priority"]),
        ("/v1/explain", {"query": QUERY, "documents": DOCUMENTS},
         ["model", "top_n", "max_tokens_per_doc", "by_head", "priority"]),
    ],
)  # fmt: skip
def test_null_means_the_default(
    reranker: Reranker, path: str, needed: dict[str, Any], optional: list[str]
) -> None:
    plain = post(reranker, path, needed)
    nulls = post(reranker, path, {**needed, **dict.fromkeys(optional)})
    assert (plain.status_code, nulls.status_code) == (200, 200), nulls.text
    if isinstance(plain.json(), list):
        assert nulls.json() == plain.json()
    else:
        own = {"id": "", "created": 0}
        assert {**nulls.json(), **own} == {**plain.json(), **own}


def test_served_names(reranker: Reranker) -> None:
    body = {**GOOD, "model": "rerank-v3.5"}
    assert post(reranker, "/v2/rerank", body, served_names=("rerank-v3.5",)).status_code == 200


def test_openapi_describes_every_endpoint(reranker: Reranker) -> None:
    described = call(reranker, "GET", "/openapi.json").json()
    assert set(described["paths"]) == {
        "/v2/rerank", "/v1/rerank", "/rerank", "/score", "/v1/score", "/v1/explain",
        "/v1/detect", "/health", "/ready", "/info", "/metrics",
    }  # fmt: skip
    schemas = described["components"]["schemas"]
    assert {"CohereV2Request", "RerankRequest", "TEIRequest", "ScoreRequest", "Problem"} <= set(
        schemas
    )


def test_an_answer_takes_no_nan() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            CohereResult(index=0, relevance_score=value)
        with pytest.raises(ValueError, match="finite"):
            TEIResult(index=0, score=value)
