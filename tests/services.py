"""Run the service for a test: in process without a socket, or behind a real one in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from fake_backend import SharedFakeBackend, shared_tokens

from core_rerank import InjectionHeads, Reranker
from core_rerank.injection_heads import Task
from core_rerank.service import Service, ServiceSettings, create_app, listen
from core_rerank.types import Screening
from hook_runtime.specs import CaptureRequest, Head

DOCUMENTS = [
    "Sourdough bread rises with wild yeast.",
    "Ocean tides are caused by the gravity of the Moon and the Sun.",
    "A cat sat on the mat.",
    "The tides of the sea follow the Moon.",
]
QUERY = "What causes ocean tides?"
BODY = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
"""A request in TEI's form."""


def fake_reranker(tokenizer: Any, **arguments: Any) -> tuple[Reranker, SharedFakeBackend]:
    """A pointwise reranker without a model, whose callers share its batches."""
    backend = SharedFakeBackend(tokenizer, **arguments)
    return Reranker(backend=backend, heads=["1-2", "0-1"], window=1), backend


DETECTS = Head(2, 0)
"""The head of `injection_heads` for the task "instruction"; the other task's is 1-1."""


def injection_heads(task: Task) -> InjectionHeads:
    """One head of the fake model; a score above 0.6 is flagged."""
    return InjectionHeads.model_validate(
        {
            "model": "test/fake",
            "num_layers": 4,
            "num_heads": 3,
            "heads": [str(DETECTS)] if task == "instruction" else ["1-1"],
            "threshold": 0.6,
            "method": "k-sigma",
            "task": task,
        }
    )


def screening_reranker(
    tokenizer: Any, screen: Screening = True
) -> tuple[Reranker, SharedFakeBackend]:
    """As `fake_reranker`, able to screen; its injection heads are drawn to bread.

    So they score ``DOCUMENTS[0]`` 0.75, and texts without bread 0.5.
    """
    bread = tokenizer.encode(" bread")[0]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        if request.probe.reduction == "tokens":
            return shared_tokens(request, head)
        texts = [request.prompt_token_ids[slice(*span)] for span in request.probe.spans]
        return np.array([0.3 if bread in text else 0.1 for text in texts])

    backend = SharedFakeBackend(tokenizer, attention=attention)
    heads = injection_heads("document")
    ranks: list[object] = ["1-2", "0-1"]
    return (
        Reranker(backend=backend, heads=ranks, window=1, screen=screen, screen_heads=heads),
        backend,
    )


def in_process(reranker: Reranker, **settings: Any) -> httpx.AsyncClient:
    """A client of the application; use it in one event loop."""
    app = create_app(reranker, ServiceSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service")


def with_client(
    reranker: Reranker, ask: Callable[[httpx.AsyncClient], Awaitable[Any]], **settings: Any
) -> Any:
    """What ``ask`` gives with a client of the service."""

    async def inside() -> Any:
        async with in_process(reranker, **settings) as client:
            return await ask(client)

    return asyncio.run(inside())


def workload(client: httpx.AsyncClient) -> Any:
    """The `Workload` of the application that ``in_process`` made a client of."""
    return client._transport.app.state.workload  # type: ignore[attr-defined]


def call(reranker: Reranker, method: str, path: str, body: Any = None, **settings: Any) -> Any:
    """The response to one request of a service that is made for it."""

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        content = None if body is None else json.dumps(body)  # in ASCII: may hold anything
        headers = {"content-type": "application/json"}
        return await client.request(method, path, content=content, headers=headers)

    return with_client(reranker, ask, **settings)


def metric(text: str, name: str) -> float:
    """The value of one metric in the text of ``/metrics``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"core_rerank_{name} ")]
    return float(line.split()[-1])


@dataclass
class Running:
    """A service behind a socket of this machine."""

    url: str
    exit_code: list[int] = field(default_factory=list)


@contextmanager
def behind_socket(
    reranker: Reranker, host: str = "127.0.0.1", any_host: bool = False, **settings: Any
) -> Iterator[Running]:
    """A service in a thread; asked to stop afterwards, and joined."""
    bound = listen(host, 0)
    name = f"[{host}]" if ":" in host else host
    running = Running(f"http://{name}:{bound.getsockname()[1]}")
    started = threading.Event()
    service = Service(
        reranker, bound, ServiceSettings(**settings), any_host=any_host, started=started.set
    )

    def run() -> None:
        with bound:
            running.exit_code.append(service.run())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(20)
    try:
        yield running
    finally:
        service.stop()
        thread.join(60)
        assert not thread.is_alive()
