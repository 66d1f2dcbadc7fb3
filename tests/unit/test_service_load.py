"""The service under load: queue, deadlines, callers that leave, limits, keys, death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from services import DOCUMENTS, QUERY, behind_socket, call, fake_reranker, in_process, metric

from core_rerank import MissingDependencyError, Reranker
from core_rerank.service.admission import Admission
from core_rerank.service.errors import QueueFull
from core_rerank.service.server import ENGINE_DIED
from core_rerank.service.settings import ServiceSettings, check_binding, is_loopback

BODY = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}


def run(
    reranker: Reranker, ask: Callable[[httpx.AsyncClient], Awaitable[Any]], **settings: Any
) -> Any:
    """What ``ask`` gives with a client of the service."""

    async def inside() -> Any:
        async with in_process(reranker, **settings) as client:
            return await ask(client)

    return asyncio.run(inside())


def workload(client: httpx.AsyncClient) -> Any:
    return client._transport.app.state.workload  # type: ignore[attr-defined]


def test_requests_at_the_same_time_share_the_engine(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=0.2)
    expected = call(fake_reranker(smollm2_tokenizer)[0], "POST", "/rerank", BODY).json()

    async def ask(client: httpx.AsyncClient) -> Any:
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(10)))
        assert time.perf_counter() - started < 1.5
        return answers

    answers = run(reranker, ask)
    assert all(answer.json() == expected for answer in answers)
    assert backend.started == 10


def test_a_full_queue_is_429_with_when_to_come_back(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, seconds=0.2)

    async def ask(client: httpx.AsyncClient) -> Any:
        answers = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(9)))
        metrics = (await client.get("/metrics")).text
        assert (workload(client).running, workload(client).waiting) == (0, 0)
        return answers, metrics

    answers, metrics = run(reranker, ask, max_running=2, max_waiting=3)
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 4
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error_type"] == "Overloaded"
    assert "max_waiting=3" in refused[0].json()["message"]
    assert [answer.status_code for answer in answers].count(200) == 5
    assert 'core_rerank_dropped_requests_total{reason="queue_full"} 4.0' in metrics
    assert 'core_rerank_requests_total{route="/rerank",status="200"} 5.0' in metrics
    assert metric(metrics, "waiting_requests") == 0


def test_the_urgent_go_first() -> None:
    order = []

    async def one(admission: Admission, name: str, priority: int) -> None:
        await admission.enter(priority)
        order.append(name)
        await asyncio.sleep(0.01)
        admission.leave(0.01)

    async def everything() -> None:
        admission = Admission(1, 10)
        names = [("first", 0), ("b", 1), ("c", 1), ("urgent", 0), ("late", 2)]
        await asyncio.gather(*(one(admission, name, priority) for name, priority in names))
        assert (admission.running, admission.waiting) == (0, 0)

    asyncio.run(everything())
    assert order == ["first", "urgent", "b", "c", "late"]


def test_who_leaves_the_queue_frees_the_place() -> None:
    async def everything() -> None:
        admission = Admission(1, 1)
        await admission.enter()
        waiting = asyncio.create_task(admission.enter())
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await admission.enter()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        next_one = asyncio.create_task(admission.enter())
        await asyncio.sleep(0)
        admission.leave(1.0)
        next_one.cancel()  # at the moment its turn came
        await asyncio.gather(next_one, return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)
        await admission.enter()

    asyncio.run(everything())


def test_a_deadline_drops_the_work(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=5)

    async def ask(client: httpx.AsyncClient) -> Any:
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(3)))
        assert time.perf_counter() - started < 3
        assert (workload(client).running, workload(client).waiting) == (0, 0)
        return answers

    answers = run(reranker, ask, timeout_s=0.3, max_running=2)
    assert [answer.status_code for answer in answers] == [504] * 3
    assert "0.3 s" in answers[0].json()["message"]
    assert backend.cancelled == backend.started == 2  # the third never began


def test_a_caller_may_ask_for_less_time_but_not_for_more(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, seconds=1)

    async def ask(client: httpx.AsyncClient) -> list[int]:
        return [
            (await client.post("/rerank", json=BODY, headers={"X-Request-Timeout": t})).status_code
            for t in ("0.05", "100", "soon", "0", "nan")
        ]

    assert run(reranker, ask, timeout_s=0.2) == [504, 504, 422, 422, 422]


def test_a_caller_who_leaves_frees_the_engine(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=30)
    with behind_socket(reranker) as running:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/rerank", json=BODY, timeout=0.5)
        for _ in range(100):
            if backend.cancelled:
                break
            time.sleep(0.05)
        metrics = httpx.get(f"{running.url}/metrics").text
    assert backend.cancelled == 1
    assert metric(metrics, "running_requests") == 0
    assert 'core_rerank_dropped_requests_total{reason="client_gone"} 1.0' in metrics


def test_a_backend_that_cannot_be_stopped_keeps_its_turn(smollm2_tokenizer: Any) -> None:
    """Or its successors would pile up in threads behind it."""

    class Slow(FakeBackend):
        at_once = most = 0

        def capture(self, requests: Any, *, progress: bool = False) -> Any:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            time.sleep(0.3)
            self.at_once -= 1
            return super().capture(requests)

    backend = Slow(smollm2_tokenizer)
    reranker = Reranker(backend=backend, heads=["1-2"], window=1)

    async def ask(client: httpx.AsyncClient) -> list[int]:
        hurried = {"X-Request-Timeout": "0.05"}
        first = await client.post("/rerank", json=BODY, headers=hurried)
        assert workload(client).running == 1
        rest = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(3)))
        return [first.status_code, *(answer.status_code for answer in rest)]

    assert run(reranker, ask) == [504, 200, 200, 200]
    assert backend.most == 1


@pytest.mark.parametrize("leaves", ["deadline", "connection"])
def test_pairs_that_nobody_waits_for_are_not_ranked(smollm2_tokenizer: Any, leaves: str) -> None:
    """The pair in the thread ends and keeps its turn; those behind it are dropped."""
    going_on = threading.Event()

    class Held(FakeBackend):
        def capture(self, requests: Any, *, progress: bool = False) -> Any:
            done = super().capture(requests)
            assert going_on.wait(20)
            return done

    backend = Held(smollm2_tokenizer)
    reranker = Reranker(backend=backend, heads=["1-2"], window=1)
    pairs = {"text_1": [f"query {i}" for i in range(8)], "text_2": ["a document"] * 8}
    patience = {"X-Request-Timeout": "0.3"} if leaves == "deadline" else {}
    timeout_s = 20 if leaves == "deadline" else 0.5
    with behind_socket(reranker) as running:
        try:
            answer = httpx.post(
                f"{running.url}/score", json=pairs, headers=patience, timeout=timeout_s
            )
            assert (leaves, answer.status_code) == ("deadline", 504)
        except httpx.ReadTimeout:
            assert leaves == "connection"
        while 'reason="' not in httpx.get(f"{running.url}/metrics").text:
            time.sleep(0.02)
        assert len(backend.batches) == 1
        assert metric(httpx.get(f"{running.url}/metrics").text, "running_requests") == 1
        going_on.set()
        assert httpx.post(f"{running.url}/rerank", json=BODY, timeout=20).status_code == 200
    assert len(backend.batches) == 2


def test_limits_are_413_and_named(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer)

    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 100

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [
            await client.post("/rerank", json={"query": QUERY, "texts": ["a"] * 33}),
            await client.post("/rerank", json={"query": QUERY, "texts": ["a" * 3000]}),
            await client.post(
                "/rerank", content=chunks(), headers={"content-type": "application/json"}
            ),
        ]

    many, large, streamed = run(reranker, ask, max_documents=32, max_body_bytes=2000)
    assert [r.status_code for r in (many, large, streamed)] == [413] * 3
    assert "33" in many.json()["message"]
    assert "32 (max_documents)" in many.json()["message"]
    assert "2000 bytes" in large.json()["message"]
    assert "2000 bytes" in streamed.json()["message"]
    assert not backend.batches


def test_keys(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)
    headers = [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic secret"},
        {"Authorization": "Bearer secret"},
        {"authorization": "bearer second"},
        {"X-API-Key": "secret"},
        {"X-API-Key": "s\u00e9cret".encode("latin-1")},
    ]

    async def ask(client: httpx.AsyncClient) -> Any:
        posts = [await client.post("/rerank", json=BODY, headers=h) for h in headers]
        opened = [await client.get(path) for path in ("/health", "/ready")]
        closed = [await client.get(path) for path in ("/info", "/metrics", "/docs", "/nowhere")]
        return posts, opened, closed

    posts, opened, closed = run(reranker, ask, api_keys=("secret", "second"))
    assert [r.status_code for r in posts] == [401, 401, 401, 200, 200, 200, 401]
    assert posts[0].headers["www-authenticate"] == "Bearer"
    assert [r.status_code for r in opened] == [200, 200]
    assert [r.status_code for r in closed] == [401] * 4


def test_beyond_loopback_a_key_or_a_flag_is_needed() -> None:
    bare, keyed = ServiceSettings(), ServiceSettings(api_keys=("k",))
    assert [is_loopback(h) for h in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "host")] == [
        True, True, True, False, False,
    ]  # fmt: skip
    check_binding("127.0.0.1", bare, False)
    check_binding("0.0.0.0", keyed, False)
    check_binding("0.0.0.0", bare, True)
    with pytest.raises(ValueError, match="--allow-unauthenticated"):
        check_binding("0.0.0.0", bare, False)


def test_settings_are_checked_and_keep_their_keys_to_themselves() -> None:
    for wrong in (
        {"max_documents": 0}, {"max_waiting": -1}, {"timeout_s": 0}, {"drain_s": float("nan")},
        {"max_running": True}, {"api_keys": (" ",)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="|".join(["must be", "API key"])):
            ServiceSettings(**wrong)
    assert "hidden" not in repr(ServiceSettings(api_keys=("hidden",)))


def test_no_page_can_reach_a_service_without_a_key_by_another_name(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)
    with behind_socket(reranker) as running:
        rebound = httpx.get(f"{running.url}/info", headers={"Host": "evil.example"})
        simple = httpx.post(
            f"{running.url}/rerank",
            content=b'{"query": "q", "texts": ["a"]}',
            headers={"Content-Type": "text/plain"},
        )
        info = httpx.get(f"{running.url}/info")
    assert rebound.status_code == 400
    assert rebound.json()["field"] == "Host"
    assert simple.status_code == 415  # a web page may send text, but no JSON, elsewhere unasked
    assert info.status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_every_loopback_address_answers_under_its_own_name(
    smollm2_tokenizer: Any, host: str
) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)
    with behind_socket(reranker, host=host) as running:
        assert httpx.get(f"{running.url}/info").status_code == 200
        if host != "127.0.0.9":
            port = running.url.rsplit(":", 1)[1]
            shouted = httpx.get(f"{running.url}/info", headers={"Host": f"LOCALHOST:{port}"})
            assert shouted.status_code == 200
        for wrong in ("", "[", "localhost.evil.example", "evil.example:80"):
            refused = httpx.get(f"{running.url}/info", headers={"Host": wrong})
            assert refused.status_code == 400
    with behind_socket(reranker, host=host, any_host=True) as running:
        assert httpx.get(f"{running.url}/info", headers={"Host": "a.proxy"}).status_code == 200


def test_request_ids(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)

    async def ask(client: httpx.AsyncClient) -> list[str]:
        given = ["trace-1.a", "bad id\t<x>", ""]
        answers = [
            await client.get("/nowhere", headers={"X-Request-ID": one} if one else {})
            for one in given
        ]
        assert [a.json()["id"] for a in answers] == [a.headers["x-request-id"] for a in answers]
        assert {a.status_code for a in answers} == {404}
        return [answer.headers["x-request-id"] for answer in answers]

    kept, replaced, made = run(reranker, ask)
    assert kept == "trace-1.a"
    assert len(replaced) == len(made) == 32
    assert replaced != made


SECRET = "xylophone-quasar"


def test_no_document_is_logged_even_when_something_breaks(
    smollm2_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer)
    body = {"query": SECRET, "texts": [SECRET, "b"]}

    def broken(requests: Any, **_: Any) -> Any:
        raise RuntimeError(f"cannot read {SECRET}")

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        await client.post("/rerank", json=body)
        await client.post("/rerank", json={**body, "texts": [SECRET, 1]})
        backend.capture = broken  # type: ignore[method-assign]
        return await client.post("/rerank", json=body)

    with caplog.at_level(logging.DEBUG):
        failed = run(reranker, ask)
    assert failed.status_code == 500
    assert failed.json()["id"] in caplog.text
    assert "RuntimeError" in caplog.text
    assert "in broken" in caplog.text
    assert SECRET not in caplog.text + failed.text


def test_info_and_health(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)
    info = call(reranker, "GET", "/info").json()
    assert info["model_id"] == "test/fake"
    assert info["heads"] == ["1-2", "0-1"]
    assert (info["max_client_batch_size"], info["max_input_length"]) == (1000, 512)
    assert call(reranker, "GET", "/health").status_code == 200
    assert call(reranker, "GET", "/ready").json() == {"status": "ready"}
    reranker.close()
    ready = call(reranker, "GET", "/ready")
    assert ready.status_code == 503
    assert "closed" in ready.json()["reason"]


def test_while_it_stops_new_work_is_503(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)

    async def ask(client: httpx.AsyncClient) -> Any:
        workload(client).stop_taking("the service is stopping")
        return await client.post("/rerank", json=BODY), await client.get("/ready")

    refused, ready = run(reranker, ask)
    assert refused.status_code == ready.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert ready.json()["reason"] == "the service is stopping"


def test_a_dead_engine_ends_the_service(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=0.3)
    answers: list[httpx.Response] = []
    with behind_socket(reranker) as running:

        def ask() -> None:
            body = {"query": QUERY, "documents": ["a"]}
            answers.append(httpx.post(f"{running.url}/v1/rerank", json=body))

        asking = threading.Thread(target=ask)
        asking.start()
        while not backend.started:
            time.sleep(0.01)
        backend.dead = True
        ready = httpx.get(f"{running.url}/ready")
        asking.join()
        for _ in range(100):
            if running.exit_code:
                break
            time.sleep(0.05)
        assert running.exit_code == [ENGINE_DIED]
    assert ready.status_code == 503
    assert "engine is gone" in ready.json()["reason"]
    assert answers[0].status_code == 503
    assert "retry-after" in answers[0].headers


def test_a_body_that_does_not_come_ends_the_connection(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core_rerank.service import gate

    monkeypatch.setattr(gate, "BODY_TIMEOUT_S", 0.3)
    reranker, _ = fake_reranker(smollm2_tokenizer)
    with behind_socket(reranker) as running:
        port = int(running.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=10) as slow:
            slow.sendall(
                b"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
                b"Content-Type: application/json\r\n\r\n{"
            )
            assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        with socket.create_connection(("127.0.0.1", port), timeout=0.1) as dripping:
            dripping.sendall(
                b"POST /rerank HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
                b"Content-Type: application/json\r\n\r\n"
            )
            answer = b""
            for _ in range(20):  # each piece in time, all of them not
                dripping.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    answer = dripping.recv(4096)
                    break
            assert answer.startswith(b"HTTP/1.1 408")


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import core_rerank.service as package

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "core_rerank.service.server", raising=False)
    with pytest.raises(MissingDependencyError, match=r"core-rerank\[server\]"):
        _ = package.Service
