"""What stands between a caller and vLLM's application: key, turns, time, an engine that dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fake_backend import SharedFakeBackend
from services import DOCUMENTS, QUERY, fake_reranker

from core_rerank import Reranker
from core_rerank.service import ServiceSettings, create_app, openai
from core_rerank.service.errors import UnknownProgram
from core_rerank.service.openai import routes_to

PATH = "/v1/completions"


class Talker:
    """Says back what it is told in so many pieces, ``seconds`` before each; or fails."""

    def __init__(self, pieces: int = 1, seconds: float = 0.0, status: int = 200) -> None:
        self.pieces, self.seconds, self.status = pieces, seconds, status
        self.running = self.most = self.cancelled = 0
        self.programs: list[str | None] = []

    async def __call__(
        self, scope: Any, receive: Any, send: Any, *, program: str | None = None
    ) -> None:
        self.programs.append(program)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            body = (await receive())["body"]
            await asyncio.sleep(self.seconds)
            await send({"type": "http.response.start", "status": self.status, "headers": []})
            for i in range(self.pieces):
                more = i + 1 < self.pieces
                await send({"type": "http.response.body", "body": body, "more_body": more})
                if more:
                    await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def only_loud(name: str) -> None:
    if name != "loud":
        raise UnknownProgram(f"no program {name!r} is loaded.", field="X-Program")


def talk(
    tokenizer: Any,
    talker: Talker,
    ask: Callable[[httpx.AsyncClient, SharedFakeBackend], Awaitable[Any]],
    **options: Any,
) -> Any:
    """What ``ask`` gives with a client of a service that has ``talker`` at `PATH`."""
    reranker, backend = fake_reranker(tokenizer, seconds=0.05)
    settings = ServiceSettings(**options)

    async def inside() -> Any:
        app = create_app(reranker, settings)
        routes = routes_to(talker, {PATH: "POST"}, only_loud, app.state.workload, settings)
        app.router.routes.extend(routes)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await ask(client, backend)

    return asyncio.run(inside())


def test_it_shares_the_queue_with_ranking(smollm2_tokenizer: Any) -> None:
    talker = Talker(seconds=0.1)

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        said = [client.post(PATH, content=f"word {i}") for i in range(4)]
        ranked = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS})
        answers = await asyncio.gather(*said, ranked, client.post(PATH, content="too many"))
        return answers, (await client.get("/metrics")).text

    answers, metrics = talk(smollm2_tokenizer, talker, ask, max_running=3, max_waiting=2)
    assert [a.text for a in answers[:4]] == [f"word {i}" for i in range(4)]
    assert [a.status_code for a in answers] == [200] * 5 + [429]
    assert answers[5].json()["error"]["type"] == "Overloaded"
    assert talker.most == 2
    assert f'core_rerank_requests_total{{route="{PATH}",status="200"}} 4.0' in metrics


def test_it_asks_for_the_key_and_refuses_what_is_too_large(smollm2_tokenizer: Any) -> None:
    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        told = {"authorization": "Bearer s3cret"}
        return (
            await client.post(PATH, content="x"),
            await client.post(PATH, content="x", headers=told),
            await client.post(PATH, content="x" * 101, headers=told),
            await client.get(PATH, headers=told),
        )

    answers = talk(smollm2_tokenizer, Talker(), ask, api_keys=("s3cret",), max_body_bytes=100)
    assert [a.status_code for a in answers] == [401, 200, 413, 405]


def test_a_header_names_the_program(smollm2_tokenizer: Any) -> None:
    talker = Talker()

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        named = [{}, {"x-program": "loud"}, {"x-program": "quiet"}]
        return [await client.post(PATH, content="x", headers=headers) for headers in named]

    answers = talk(smollm2_tokenizer, talker, ask)
    assert [a.status_code for a in answers] == [200, 200, 404]
    assert answers[2].json()["error"]["param"] == "X-Program"
    assert talker.programs == [None, "loud"]


def test_the_limit_counts_until_the_answer_begins(smollm2_tokenizer: Any) -> None:
    slow, many = Talker(seconds=5.0), Talker(pieces=4, seconds=0.12)

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        return await client.post(PATH, content="x", headers={"x-request-timeout": "0.3"})

    late = talk(smollm2_tokenizer, slow, ask)
    assert late.status_code == 504
    assert (slow.cancelled, slow.running) == (1, 0)
    assert talk(smollm2_tokenizer, many, ask).text == "xxxx"


def test_generation_leaves_turns_to_ranking(smollm2_tokenizer: Any) -> None:
    talker = Talker(seconds=5.0)

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        said = [asyncio.ensure_future(client.post(PATH, content="x")) for _ in range(5)]
        await asyncio.sleep(0.1)
        body = {"query": QUERY, "texts": DOCUMENTS}
        ranked = await asyncio.gather(*(client.post("/rerank", json=body) for _ in range(3)))
        for one in said:
            one.cancel()
        await asyncio.gather(*said, return_exceptions=True)
        return [answer.status_code for answer in ranked]

    assert talk(smollm2_tokenizer, talker, ask, max_running=4, timeout_s=2.0) == [200] * 3
    assert talker.most == 3


def test_a_program_has_no_beam_search(smollm2_tokenizer: Any) -> None:
    talker = Talker()
    beams, greedy, broken = b'{"use_beam_search": "true"}', b'{"use_beam_search": false}', b"{"
    loud = {"x-program": "loud"}

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        return [
            await client.post(PATH, content=beams, headers=loud),
            await client.post(PATH, content=beams),
            await client.post(PATH, content=greedy, headers=loud),
            await client.post(PATH, content=broken, headers=loud),
        ]

    answers = talk(smollm2_tokenizer, talker, ask)
    assert [a.status_code for a in answers] == [400, 200, 200, 200]
    assert answers[0].json()["error"]["param"] == "use_beam_search"
    assert talker.programs == [None, "loud", "loud"]


def test_who_takes_nothing_frees_the_turn(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai, "STALLED_S", 0.1)
    talker = Talker(pieces=3)

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        messages = [{"type": "http.request", "body": b"x", "more_body": False}]
        sent = []

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()  # the connection stays open
            return messages.pop()

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()
            sent.append(message["type"])

        app = client._transport.app  # type: ignore[attr-defined]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 5)
        metrics = (await client.get("/metrics")).text
        return sent, app.state.workload.running, metrics

    sent, running, metrics = talk(smollm2_tokenizer, talker, ask, max_running=1)
    assert (sent, running, talker.cancelled) == (["http.response.start"], 0, 1)
    assert 'core_rerank_dropped_requests_total{reason="client_gone"} 1.0' in metrics


def test_who_leaves_while_sending_is_no_failure_of_ours(
    smollm2_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        messages = [
            {"type": "http.request", "body": b"{", "more_body": True},
            {"type": "http.disconnect"},
        ]

        async def receive() -> Any:
            return messages.pop(0)

        async def send(_: Any) -> None:
            """Nobody listens."""

        app = client._transport.app  # type: ignore[attr-defined]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        await app(scope, receive, send)
        return (await client.get("/metrics")).text

    metrics = talk(smollm2_tokenizer, Talker(), ask)
    assert f'core_rerank_requests_total{{route="{PATH}",status="499"}} 1.0' in metrics
    assert "failed with" not in caplog.text


def test_who_leaves_frees_the_turn(smollm2_tokenizer: Any) -> None:
    talker = Talker(seconds=5.0)

    async def ask(client: httpx.AsyncClient, _: Any) -> Any:
        messages = [{"type": "http.request", "body": b"x", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.sleep(0.1)
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            """Nobody listens."""

        app = client._transport.app  # type: ignore[attr-defined]
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
        with contextlib.suppress(OSError):
            await app(scope, receive, send)
        return app.state.workload.running

    assert talk(smollm2_tokenizer, talker, ask) == 0
    assert talker.cancelled == 1


def test_a_dead_engine_is_503(smollm2_tokenizer: Any) -> None:
    talker = Talker(seconds=0.1, status=500)

    async def ask(client: httpx.AsyncClient, backend: SharedFakeBackend) -> Any:
        failed = await client.post(PATH, content="x")
        asked = asyncio.ensure_future(client.post(PATH, content="x"))
        await asyncio.sleep(0.05)
        backend.dead = True
        return failed, await asked, await client.post(PATH, content="x")

    answers = talk(smollm2_tokenizer, talker, ask)
    assert [a.status_code for a in answers] == [500, 503, 503]
    assert answers[0].text == "x"  # a failure of its own is vLLM's to tell
    assert "engine is gone" in answers[1].json()["error"]["message"]


def test_other_backends_cannot(smollm2_tokenizer: Any) -> None:
    reranker: Reranker = fake_reranker(smollm2_tokenizer)[0]
    with pytest.raises(TypeError, match="the backend fake does not generate for many callers"):
        create_app(reranker, ServiceSettings(openai=True))
