"""Injection detection over HTTP: ``/v1/detect``, and ``screen`` of the requests that rank."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import numpy as np
import pytest
from fake_backend import SharedFakeBackend
from services import DOCUMENTS, QUERY, behind_socket, injection_heads, metric, screening_reranker

from core_rerank import InjectionDetector, Reranker
from core_rerank.errors import RemoteError
from core_rerank.integrations.source import open_source
from core_rerank.service import ServiceSettings, create_app
from core_rerank.service.responses import relevance
from hook_runtime.errors import ProbeError

TASK = "Summarize the mail."
ATTACK = DOCUMENTS[0]  # the fake's heads are drawn to bread


@pytest.fixture
def reranker(smollm2_tokenizer: Any) -> Reranker:
    return screening_reranker(smollm2_tokenizer)[0]


@pytest.fixture
def backend(reranker: Reranker) -> SharedFakeBackend:
    assert isinstance(reranker.backend, SharedFakeBackend)
    return reranker.backend


def ask(reranker: Reranker, *requests: tuple[str, Any], **settings: Any) -> list[httpx.Response]:
    """Answers of one service to (path, body) each; GET without a body."""
    detector = InjectionDetector(reranker.backend, injection_heads("instruction"))
    app = create_app(reranker, ServiceSettings(**settings), detector=detector)

    async def inside() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return [
                await (client.get(path) if body is None else client.post(path, json=body))
                for path, body in requests
            ]

    return asyncio.run(inside())


def test_detect(reranker: Reranker, backend: SharedFakeBackend) -> None:
    body = {"instruction": TASK, "data": [ATTACK, DOCUMENTS[1], ""]}
    response, metrics, info = ask(
        reranker, ("/v1/detect", body), ("/metrics", None), ("/info", None)
    )
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"] == response.headers["x-request-id"]
    assert (answer["model"], answer["threshold"]) == ("test/fake", 0.6)
    attack, calm, empty = answer["results"]
    assert attack == {
        "index": 0,
        "score": pytest.approx(0.75),
        "flagged": True,
        "focus_by_head": {"2-0": pytest.approx(0.25)},
    }
    assert (calm["index"], calm["score"], calm["flagged"]) == (1, pytest.approx(0.5), False)
    assert (empty["index"], empty["score"], empty["flagged"]) == (2, 0.0, False)
    assert [len(batch) for batch in backend.batches] == [3]  # one batch, on the reranker's engine
    assert 'core_rerank_flagged_texts_total{by="detect"} 1.0' in metrics.text
    assert 'core_rerank_requests_total{route="/v1/detect",status="200"} 1.0' in metrics.text
    assert info.json()["detect_threshold"] == info.json()["screen_threshold"] == 0.6


def test_detect_one_text_under_a_threshold_of_the_request(reranker: Reranker) -> None:
    body = {"instruction": TASK, "data": ATTACK, "threshold": None}
    own, higher, zero = ask(
        reranker,
        ("/v1/detect", body),
        ("/v1/detect", {**body, "threshold": 0.8}),
        ("/v1/detect", {**body, "data": ["", "tea"], "threshold": 0}),
    )
    assert [r["flagged"] for r in own.json()["results"]] == [True]
    assert [r["flagged"] for r in higher.json()["results"]] == [False]
    assert higher.json()["threshold"] == 0.8
    assert [r["flagged"] for r in zero.json()["results"]] == [False, True]


FINE = {"instruction": TASK, "data": "fine"}


@pytest.mark.parametrize(
    ("body", "status", "field", "told"),
    [
        ({"data": "a"}, 422, "instruction", "missing"),
        ({**FINE, "instruction": " "}, 422, "instruction", "is blank"),
        ({**FINE, "data": []}, 422, "data", "empty"),
        ({**FINE, "data": ["a", 3]}, 422, "data[1]", "string"),
        ({**FINE, "data": None}, 422, "data", "string"),
        ({**FINE, "data": ["a"] * 4}, 413, "data", "limit is 3"),
        ({**FINE, "threshold": 1.5}, 422, "threshold", "less than or equal to 1"),
        ({**FINE, "threshold": True}, 422, "threshold", "number|integer"),
        ({**FINE, "model": "other"}, 404, "model", "not served"),
        ({**FINE, "data": ["a", "moon " * 5000]}, 422, "data", r"Nothing is cut.*\(in item 1\)"),
    ],
)
def test_mistakes_of_detect(
    reranker: Reranker, body: Any, status: int, field: str, told: str
) -> None:
    (response,) = ask(reranker, ("/v1/detect", body), max_documents=3)
    answer = response.json()
    assert (response.status_code, answer.get("field")) == (status, field), answer
    assert re.search(told, answer["message"]), answer


def test_failures_of_detect(reranker: Reranker, backend: SharedFakeBackend) -> None:
    backend._attention = lambda request, head: np.full(len(request.probe.spans), np.nan)
    (nan,) = ask(reranker, ("/v1/detect", FINE))
    assert nan.status_code == 500
    assert "not finite" in nan.json()["message"]
    backend.seconds = 5.0
    (late,) = ask(reranker, ("/v1/detect", FINE), timeout_s=0.1)
    assert late.status_code == 504
    assert backend.cancelled == 1
    backend.seconds, backend.dead = 0.0, True
    gone, ready = ask(reranker, ("/v1/detect", FINE), ("/ready", None))
    assert (gone.status_code, ready.status_code) == (503, 503)


def test_a_service_without_a_detector_says_so(reranker: Reranker) -> None:
    with behind_socket(reranker) as running:
        refused = httpx.post(f"{running.url}/v1/detect", json=FINE)
    assert refused.status_code == 404
    assert "start it with --detect" in refused.json()["message"]


def test_a_detector_shares_the_rerankers_engine(reranker: Reranker, smollm2_tokenizer: Any) -> None:
    own = InjectionDetector(SharedFakeBackend(smollm2_tokenizer), injection_heads("instruction"))
    with pytest.raises(ValueError, match=r"InjectionDetector\(reranker.backend\)"):
        create_app(reranker, detector=own)
    short = SharedFakeBackend(smollm2_tokenizer, layers_kept=2)
    with pytest.raises(ProbeError, match="beyond the 2 layers kept"):
        InjectionDetector(short, injection_heads("instruction"))
    with pytest.raises(ProbeError, match="beyond the 2 layers kept"):
        Reranker(backend=short, heads=["1-2"], window=1, extra_heads=["2-0"])


BODY = {"query": QUERY, "documents": [*DOCUMENTS, ""], "model": "test/fake"}


def test_screen_flags_where_it_is_asked_for(reranker: Reranker) -> None:
    for path in ("/v2/rerank", "/v1/rerank", "/rerank"):
        plain, no, yes, named, metrics = ask(
            reranker,
            (path, BODY),
            (path, {**BODY, "screen": False}),
            (path, {**BODY, "screen": True}),
            (path, {**BODY, "screen": "flag"}),
            ("/metrics", None),
        )
        for quiet in (plain, no):
            assert not any(name in quiet.text for name in ("injection", "flagged", "dropped"))
        assert named.json()["results"] == yes.json()["results"]
        answer = yes.json()
        assert answer["dropped"] == []
        assert {r["index"]: r["flagged"] for r in answer["results"]} == {
            i: i == 0 for i in range(5)
        }
        scores = {r["index"]: r.get("injection") for r in answer["results"]}
        assert scores == {0: pytest.approx(0.75), **dict.fromkeys((1, 2, 3), 0.5), 4: None}
        bare = [
            {k: v for k, v in r.items() if k not in ("injection", "flagged")}
            for r in answer["results"]
        ]
        assert bare == plain.json()["results"]
        assert 'core_rerank_flagged_texts_total{by="rerank"} 2.0' in metrics.text


def test_screen_drops(reranker: Reranker) -> None:
    for path in ("/v2/rerank", "/v1/rerank"):
        plain, dropped = ask(reranker, (path, BODY), (path, {**BODY, "screen": "drop"}))
        assert dropped.json()["dropped"] == [0]
        left = [r["index"] for r in dropped.json()["results"]]
        assert left == [r["index"] for r in plain.json()["results"] if r["index"] != 0]


def test_a_reranker_that_drops_drops_only_where_it_is_asked(
    reranker: Reranker, smollm2_tokenizer: Any
) -> None:
    dropping = screening_reranker(smollm2_tokenizer, "drop")[0]
    assert dropping.rerank(QUERY, DOCUMENTS).dropped == (0,)
    one, each = {"text_1": QUERY}, {"text_1": [QUERY] * len(DOCUMENTS)}
    requests = [
        ("/score", {**one, "text_2": DOCUMENTS}),
        ("/score", {**each, "text_2": DOCUMENTS}),
        ("/rerank", {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}),
        ("/v1/rerank", BODY),
    ]
    answers = ask(dropping, *requests)
    assert [answer.status_code for answer in answers] == [200] * 4
    together, apart, tei, jina = (answer.json() for answer in answers)
    expected = {item.index: item.score for item in reranker.rerank(QUERY, DOCUMENTS)}
    for scores in (together, apart):
        found = {item["index"]: item["score"] for item in scores["data"]}
        assert found == {i: pytest.approx(relevance(score)) for i, score in expected.items()}
    assert {item["index"]: item["score"] for item in tei} == pytest.approx(expected)
    assert {item["index"] for item in jina["results"]} == set(range(5))


def test_screen_explains(reranker: Reranker) -> None:
    plain, flag, drop = (
        answer.json()
        for answer in ask(
            reranker,
            ("/v1/explain", BODY),
            ("/v1/explain", {**BODY, "screen": "flag"}),
            ("/v1/explain", {**BODY, "screen": "drop"}),
        )
    )
    assert "dropped" not in plain
    assert not any("injection" in item for item in plain["documents"])
    assert flag["dropped"] == []
    assert [item["index"] for item in flag["documents"] if item.get("flagged")] == [0]
    assert drop["dropped"] == [0]


def test_one_call_screens_otherwise_than_the_reranker(
    reranker: Reranker, backend: SharedFakeBackend
) -> None:
    without = reranker.rerank(QUERY, DOCUMENTS, screen=False)
    assert {request.probe.reduction for request in backend.batches[-1]} == {"tokens"}
    assert all(item.injection is None for item in without)
    assert reranker.rerank(QUERY, DOCUMENTS, screen="drop").dropped == (0,)
    assert [item.index for item in reranker.rerank(QUERY, DOCUMENTS) if item.flagged] == [0]
    assert reranker.rerank(QUERY, DOCUMENTS, screen=True).dropped == ()
    unscreened = Reranker(backend=backend, heads=["1-2"], window=1)
    with pytest.raises(ValueError, match="create it with screen=True"):
        unscreened.rerank(QUERY, DOCUMENTS, screen=True)
    with pytest.raises(ValueError, match="must be True, False"):
        reranker.rerank(QUERY, DOCUMENTS, screen="delete")  # type: ignore[arg-type]


def test_the_remote_source_screens(reranker: Reranker) -> None:
    documents = [*DOCUMENTS, ""]
    with behind_socket(reranker) as running:
        url = running.url
        flagged = open_source(base_url=url, settings={"screen": "flag"}).rank(QUERY, documents)
        dropping = open_source(base_url=url, settings={"screen": "drop"})
        dropped = dropping.rank(QUERY, documents)
        best = asyncio.run(dropping.arank(QUERY, documents, 2))
        plain = open_source(base_url=url).rank(QUERY, documents)
        counted = metric(httpx.get(f"{url}/metrics").text, "request_documents_count")
    assert counted == 4
    assert {one.index: one.flagged for one in flagged} == {i: i == 0 for i in range(5)}
    injections = {one.index: one.injection for one in flagged}
    assert injections == {0: pytest.approx(0.75), **dict.fromkeys((1, 2, 3), 0.5), 4: None}
    assert [(one.index, one.score) for one in flagged] == [(o.index, o.score) for o in plain]
    assert [one.index for one in dropped] == [one.index for one in plain if one.index != 0]
    assert best == dropped[:2]
    assert {one.injection for one in plain} == {None}


def test_the_remote_source_is_told_by_a_server_that_cannot_screen(
    backend: SharedFakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscreened = Reranker(backend=backend, heads=["1-2"], window=1)
    with behind_socket(unscreened) as running:
        source = open_source(base_url=running.url, settings={"screen": "flag"})
        with pytest.raises(RemoteError, match="Start it with --screen"):
            source.rank(QUERY, DOCUMENTS)
    for text in (
        '{"results": [{"index": 0, "relevance_score": 1}]}',  # of one that does not know the field
        '{"results": [{"index": 0, "relevance_score": 1}], "dropped": []}',
        '{"results": [{"index": 0, "relevance_score": 1, "flagged": true, "injection": NaN}],'
        ' "dropped": []}',
        '{"results": [{"index": 0, "relevance_score": 1, "flagged": true}], "dropped": [0]}',
        '{"results": [{"index": 0, "relevance_score": 1, "flagged": "false"}], "dropped": []}',
        '{"results": [], "dropped": [1]}',
    ):
        monkeypatch.setattr(
            httpx.Client, "post", lambda *_, text=text, **__: httpx.Response(200, text=text)
        )
        with pytest.raises(RemoteError):
            source.rank(QUERY, ["one"])
    with pytest.raises(ValueError, match="leave out window"):
        open_source(base_url="http://h", settings={"screen": "flag", "window": 1})
    with pytest.raises(ValueError, match="screen must be"):
        open_source(base_url="http://h", settings={"screen": "delete"})
