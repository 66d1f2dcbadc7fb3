"""Whom and what the service lets in: limits, keys, addresses, slow bodies; ids, logs, health."""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Any

import httpx
import pytest
from services import BODY, QUERY, behind_socket, call, fake_reranker, with_client

from core_rerank import MissingDependencyError
from core_rerank.service.settings import ServiceSettings, check_binding, is_loopback


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

    many, large, streamed = with_client(reranker, ask, max_documents=32, max_body_bytes=2000)
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

    posts, opened, closed = with_client(reranker, ask, api_keys=("secret", "second"))
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

    kept, replaced, made = with_client(reranker, ask)
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
        failed = with_client(reranker, ask)
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
