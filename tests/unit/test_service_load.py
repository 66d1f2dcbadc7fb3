"""The service under load: queue, deadlines, callers that leave, an engine that dies."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from services import BODY, QUERY, behind_socket, call, fake_reranker, metric, with_client, workload

from core_rerank import Reranker
from core_rerank.service.admission import Admission
from core_rerank.service.errors import QueueFull
from core_rerank.service.server import ENGINE_DIED


def test_requests_at_the_same_time_share_the_engine(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=0.2)
    expected = call(fake_reranker(smollm2_tokenizer)[0], "POST", "/rerank", BODY).json()

    async def ask(client: httpx.AsyncClient) -> Any:
        started = time.perf_counter()
        answers = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(10)))
        assert time.perf_counter() - started < 1.5
        return answers

    answers = with_client(reranker, ask)
    assert all(answer.json() == expected for answer in answers)
    assert backend.started == 10


def test_a_full_queue_is_429_with_when_to_come_back(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, seconds=0.2)

    async def ask(client: httpx.AsyncClient) -> Any:
        answers = await asyncio.gather(*(client.post("/rerank", json=BODY) for _ in range(9)))
        metrics = (await client.get("/metrics")).text
        assert (workload(client).running, workload(client).waiting) == (0, 0)
        return answers, metrics

    answers, metrics = with_client(reranker, ask, max_running=2, max_waiting=3)
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


def test_long_work_waits_for_its_share_and_lets_the_rest_pass() -> None:
    async def everything() -> None:
        admission = Admission(4, 10)
        for _ in range(3):
            await admission.enter(long=True)
        urgent = asyncio.create_task(admission.enter(0, long=True))
        await asyncio.sleep(0)
        await admission.enter(9)  # the turn that is kept for it
        later = asyncio.create_task(admission.enter(9))
        await asyncio.sleep(0)
        assert (admission.running, admission.waiting) == (4, 2)
        admission.leave(0.01)
        await asyncio.wait([urgent, later], return_when=asyncio.FIRST_COMPLETED)
        assert (urgent.done(), later.done()) == (False, True)
        admission.leave(0.01, long=True)
        await urgent
        for long in (False, True, True, True):
            admission.leave(0.01, long=long)
        assert (admission.running, admission.waiting) == (0, 0)

        alone = Admission(1, 0)
        await alone.enter(long=True)

    asyncio.run(everything())


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

    answers = with_client(reranker, ask, timeout_s=0.3, max_running=2)
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

    assert with_client(reranker, ask, timeout_s=0.2) == [504, 504, 422, 422, 422]


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

    assert with_client(reranker, ask) == [504, 200, 200, 200]
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


def test_while_it_stops_new_work_is_503(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer)

    async def ask(client: httpx.AsyncClient) -> Any:
        workload(client).stop_taking("the service is stopping")
        asked = await client.post("/rerank", json=BODY), await client.get("/ready")
        return *asked, (await client.get("/metrics")).text

    refused, ready, metrics = with_client(reranker, ask)
    assert refused.status_code == ready.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert ready.json()["reason"] == "the service is stopping"
    assert 'core_rerank_dropped_requests_total{reason="unavailable"} 1.0' in metrics


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
