"""``/v1/chat/completions`` and its like: vLLM's own application behind this service's queue."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from .callers import gone, timeout_s
from .errors import BadRequest, ClientGone, ServiceError, Unavailable
from .programs import check_loaded
from .settings import ServiceSettings
from .workload import Workload

if TYPE_CHECKING:
    from core_rerank.reranker import Reranker
    from hook_runtime.bridged import BridgedHookLLM


STALLED_S = 20.0
"""A caller who takes nothing of an answer for so long is taken to be gone."""


class Application(Protocol):
    """An ASGI application that may run a request under a program."""

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, *, program: str | None = None
    ) -> None: ...


def generating_backend(reranker: Reranker) -> BridgedHookLLM:
    """The reranker's engine; TypeError where it does not generate for many callers."""
    from hook_runtime.bridged import BridgedHookLLM

    backend = reranker.backend
    if not isinstance(backend, BridgedHookLLM):
        raise TypeError(
            f"the backend {reranker.model.backend} does not generate for many callers: "
            "use Reranker(backend='vllm-async', layers=None)."
        )
    return backend


def openai_routes(workload: Workload, settings: ServiceSettings) -> Sequence[Route]:
    """Routes that vLLM's application answers on the reranker's engine.

    Raises:
        TypeError: the backend does not generate for many callers.
        hook_runtime.errors.HookRuntimeError: the engine cannot generate, or vLLM has changed.
    """
    backend = generating_backend(workload.reranker)
    from hook_runtime.openai_api import ROUTES, OpenAIApplication

    names = dict.fromkeys((*settings.served_names, workload.reranker.model_id))
    application = OpenAIApplication(backend, list(names))
    check = partial(check_loaded, backend)
    return routes_to(application, ROUTES, check, workload, settings)


def routes_to(
    application: Application,
    paths: Mapping[str, str],
    check_program: Callable[[str], None],
    workload: Workload,
    settings: ServiceSettings,
) -> Sequence[Route]:
    """Routes for ``paths``, by method, that ``application`` answers."""
    return [
        Route(
            path,
            _Endpoint(application, path, check_program, workload, settings),
            methods=[method],
        )
        for path, method in paths.items()
    ]


class _Endpoint:
    """One path: waits for its turn like a ranking, then lets the application answer."""

    def __init__(
        self,
        application: Application,
        path: str,
        check_program: Callable[[str], None],
        workload: Workload,
        settings: ServiceSettings,
    ) -> None:
        self._application = application
        self._path = path
        self._check_program = check_program
        self._workload = workload
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = SimpleNamespace(path=self._path)  # the name that is logged and counted
        request = Request(scope, receive)
        limit = timeout_s(request, self._settings)
        program = request.headers.get("x-program")
        if program is not None:
            self._check_program(program)
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ClientGone("the caller left while sending the body.") from None
        if program is not None:
            _check_program_fits(body)
        begun, stalled = asyncio.Event(), asyncio.Event()

        async def answer(_: asyncio.Event) -> None:
            engine_died = False

            async def checked(message: Message) -> None:
                """A failure because the engine died is answered by this service, not by vLLM."""
                nonlocal engine_died
                if message["type"] == "http.response.start":
                    failed = message["status"] >= 500
                    engine_died = failed and not self._workload.check_engine()
                    if not engine_died:
                        begun.set()
                if not engine_died:
                    with _sets_after(STALLED_S, stalled):
                        await send(message)

            await self._application(scope, _replayed(body), checked, program=program)
            if engine_died:
                raise self._workload.ended or Unavailable("the engine is gone.", retry_after_s=10)

        try:
            await self._workload.run_work(
                answer,
                timeout_s=limit,
                client_gone=partial(_gone_or_stalled, receive, stalled),
                begun=begun,
                long=True,
            )
        except ServiceError:
            if not begun.is_set():
                raise
            # An answer that has begun cannot become another one: the connection just ends.


@contextmanager
def _sets_after(seconds: float, event: asyncio.Event) -> Iterator[None]:
    """``event`` is set where what is inside takes longer than ``seconds``."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set)
    try:
        yield
    finally:
        timer.cancel()


async def _gone_or_stalled(receive: Receive, stalled: asyncio.Event) -> None:
    """Done when the caller closes the connection, or takes nothing of the answer any more."""
    ends = [asyncio.ensure_future(gone(receive)), asyncio.ensure_future(stalled.wait())]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()


def _check_program_fits(body: bytes) -> None:
    """BadRequest for a beam search: vLLM asks for every token of it anew, and a program would take
    each for the first one."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return  # vLLM says what is wrong with it
    if isinstance(asked, dict) and asked.get("use_beam_search") not in (None, False):
        raise BadRequest(
            "a request with a program may not use beam search: leave use_beam_search out.",
            field="use_beam_search",
        )


def _replayed(body: bytes) -> Receive:
    """The body, which was read already. That the caller left, the workload sees."""
    given = False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
