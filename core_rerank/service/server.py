"""Serves the application until a signal, or until the engine is gone."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn

from .app import LOCAL_HOSTS, create_app
from .settings import ServiceSettings, is_loopback

if TYPE_CHECKING:
    from core_rerank.injection import InjectionDetector
    from core_rerank.reranker import Reranker

    from .workload import Workload

log = logging.getLogger("core_rerank.service")

ENGINE_DIED = 3
"""Exit code of a service whose engine is gone; 0 is a stop that was asked for."""
_LAST_ANSWERS_S = 2
"""After ``drain_s``, to write 503 to whoever still waits, before uvicorn cancels without a word."""


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to ``host``, which takes no connection yet; port 0 takes any free one.

    Raises:
        OSError: the address is in use or is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class Service:
    """One reranker behind one socket. The reranker and the socket stay the caller's to close."""

    def __init__(
        self,
        reranker: Reranker,
        bound: socket.socket,
        settings: ServiceSettings | None = None,
        *,
        detector: InjectionDetector | None = None,
        any_host: bool = False,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """``started`` is called when requests are taken; ``detector`` is as in `create_app`.

        Without a key a service on loopback answers only those who ask this machine by its own
        name or address, unless ``any_host``: as a proxy may pass another name on.
        """
        settings = settings or ServiceSettings()
        address = bound.getsockname()[0]
        local = is_loopback(address) and not settings.api_keys and not any_host
        self._engine_died = False
        self._bound = bound
        app = create_app(
            reranker,
            settings,
            detector=detector,
            allowed_hosts=LOCAL_HOSTS | {address} if local else None,
            engine_died=self._end,
        )
        self._workload: Workload = app.state.workload
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(settings.drain_s) + _LAST_ANSWERS_S,
        )
        self._server = _Server(
            config, started, self.stop, settings.drain_s, self._workload.drop_taken
        )

    def run(self) -> int:
        """Answer requests until ``stop``, SIGINT or SIGTERM; the process's exit code.

        A stop ends the taking of requests; those taken get ``drain_s`` to end, are answered 503
        after it, and 0 is returned. What runs in a thread cannot be stopped and is waited for, as
        with the transformers backend. A dead engine ends it too, with `ENGINE_DIED`. A second
        SIGINT waits for no answer.
        """
        self._server.run(sockets=[self._bound])
        return ENGINE_DIED if self._engine_died else 0

    def stop(self) -> None:
        """Let ``run`` end; from any thread."""
        self._workload.stop_taking("the service is stopping")
        self._server.should_exit = True

    def _end(self) -> None:
        log.error("the engine is gone: the service ends")
        self._engine_died = True
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Says when it has started, and raises no signal again when it has ended by one.

    ``drop`` is called ``drain_s`` after a stop, where requests are still not answered.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tell_started: Callable[[], None],
        stop: Callable[[], None],
        drain_s: float,
        drop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tell_started = tell_started
        self._stop = stop
        self._drain_s = drain_s
        self._drop = drop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(self._drain_s, self._drop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: object) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self._stop()
