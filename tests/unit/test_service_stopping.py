"""A service that is stopped: what it took is answered, in time or with 503."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from services import BODY, behind_socket, fake_reranker, metric

from core_rerank import Reranker


def test_stopping_answers_what_was_taken_and_nothing_more(smollm2_tokenizer: Any) -> None:
    reranker, _ = fake_reranker(smollm2_tokenizer, seconds=1.0)
    answers: list[int] = []
    with httpx.Client() as kept, behind_socket(reranker, max_running=1) as running:
        assert kept.get(f"{running.url}/health").status_code == 200

        def ask() -> None:
            answers.append(httpx.post(f"{running.url}/rerank", json=BODY).status_code)

        asking = [threading.Thread(target=ask) for _ in range(3)]  # one runs, two wait
        for thread in asking:
            thread.start()
        for _ in range(100):
            waiting = metric(kept.get(f"{running.url}/metrics").text, "waiting_requests")
            if waiting == 2:
                break
            time.sleep(0.02)
    for thread in asking:
        thread.join()
    assert answers == [200, 200, 200]
    assert running.exit_code == [0]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health")


def test_what_does_not_end_in_time_is_503(
    smollm2_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=30)
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        answers.append(httpx.post(f"{url}/rerank", json=BODY, timeout=20))

    started = time.perf_counter()
    with behind_socket(reranker, drain_s=0.3, max_running=1) as running:
        asking = [threading.Thread(target=ask, args=(running.url,)) for _ in range(2)]
        for thread in asking:  # one runs, one waits
            thread.start()
        while metric(httpx.get(f"{running.url}/metrics").text, "waiting_requests") != 1:
            time.sleep(0.02)
    for thread in asking:
        thread.join()
    assert time.perf_counter() - started < 10
    assert backend.cancelled == backend.started == 1
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "service stopped" in answers[0].json()["message"]
    assert int(answers[0].headers["retry-after"]) >= 1
    assert running.exit_code == [0]
    assert "Traceback" not in caplog.text


def test_what_runs_in_a_thread_is_waited_for(smollm2_tokenizer: Any) -> None:
    began, ended = threading.Event(), threading.Event()

    class Slow(FakeBackend):
        def capture(self, requests: Any, *, progress: bool = False) -> Any:
            began.set()
            time.sleep(1.5)
            ended.set()
            return super().capture(requests)

    reranker = Reranker(backend=Slow(smollm2_tokenizer), heads=["1-2"], window=1)
    answers: list[tuple[int, bool]] = []

    def ask(url: str) -> None:
        status = httpx.post(f"{url}/rerank", json=BODY, timeout=20).status_code
        answers.append((status, ended.is_set()))

    with behind_socket(reranker, drain_s=0.2) as running:
        asking = threading.Thread(target=ask, args=(running.url,))
        asking.start()
        assert began.wait(20)
    assert ended.is_set()
    asking.join()
    assert answers == [(503, False)]
