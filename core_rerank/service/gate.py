"""What every request passes: its id, the API key, the size of its body, a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import page
from .errors import BadRequest, InferenceFailed, NoKey, ServiceError, TooLarge, TooSlow
from .metrics import Metrics
from .problems import Refused, answer, log_failure
from .settings import ServiceSettings

log = logging.getLogger("core_rerank.service")

OPEN_PATHS = {"/health", "/ready", *page.PATHS}
"""Answered without a key: they tell nothing, and a page cannot send one when it loads."""
BODY_TIMEOUT_S = 20.0
"""For the whole body of a request, from the moment that it is first read."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class Gate:
    """ASGI middleware around the whole application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServiceSettings,
        metrics: Metrics,
        allowed_hosts: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._hosts = allowed_hosts
        self._settings = settings
        self._keys = [key.encode() for key in settings.api_keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        started, status = time.perf_counter(), 0

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
            await self._app(scope, self._bounded(receive), with_id)
        except ServiceError as error:
            await answer(error, request_id, scope["path"])(scope, receive, with_id)
        except Exception as error:  # the boundary: nothing above may show or log its message
            log_failure(request_id, error)
            if not status:
                told = InferenceFailed("an internal error; the log has it under this id.")
                await answer(told, request_id, scope["path"])(scope, receive, with_id)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            log.info(
                "%s %s %s %d %.0f ms", request_id, scope["method"], route, status, 1000 * seconds
            )

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        if self._hosts is None:
            return
        try:
            host = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname
        except ValueError:
            host = None
        if host not in self._hosts:
            raise BadRequest(
                "the Host header does not name this machine: without an API key only "
                f"{', '.join(sorted(self._hosts))} may be asked for.",
                field="Host",
            )

    def _check_key(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        if not self._keys or path in OPEN_PATHS:
            return
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        # Every key is compared, so that the time taken tells nothing.
        fits = [hmac.compare_digest(given, key) for key in self._keys]
        if not any(fits):
            raise NoKey("this service needs an API key: send Authorization: Bearer KEY.")

    def _check_length(self, headers: Mapping[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._settings.max_body_bytes:
            raise self._too_large()

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` that refuses a body too large, or one that does not come."""
        read, more = 0, True
        deadline: float | None = None

        async def bounded() -> Message:
            nonlocal read, more, deadline
            if not more:  # what is waited for now is the caller's leaving
                return await receive()
            if deadline is None:
                deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise Refused(
                    TooSlow(f"the body did not arrive within {BODY_TIMEOUT_S:g} s.", field="body")
                ) from None
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                more = message.get("more_body", False)
                if read > self._settings.max_body_bytes:
                    raise Refused(self._too_large())
            return message

        return bounded

    def _too_large(self) -> TooLarge:
        limit = self._settings.max_body_bytes
        return TooLarge(
            f"the body is larger than {limit} bytes, which is the limit (max_body_bytes).",
            field="body",
        )


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    given: Any = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
