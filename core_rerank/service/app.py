"""The application: routes, gate, and a watch on the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI

from core_rerank import __version__

from .detection import detection_router
from .gate import Gate
from .metrics import Metrics
from .openai import generating_backend, openai_routes
from .operations import operations_router
from .page import page_router
from .problems import install
from .programs import programs_router
from .routes import RankRoutes
from .settings import ServiceSettings
from .workload import Workload

if TYPE_CHECKING:
    from core_rerank.injection import InjectionDetector
    from core_rerank.reranker import Reranker

WATCH_S = 0.5
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def create_app(
    reranker: Reranker,
    settings: ServiceSettings | None = None,
    *,
    detector: InjectionDetector | None = None,
    allowed_hosts: Collection[str] | None = None,
    engine_died: Callable[[], None] = lambda: None,
) -> FastAPI:
    """A FastAPI application that ranks with ``reranker``, which stays the caller's to close.

    Args:
        reranker: with ``backend="vllm-async"`` requests share the engine's batches. Its ``screen``
            lets requests ask for screening; those that do not are not screened.
        settings: limits and keys.
        detector: for ``/v1/detect``, on ``reranker.backend``; name its heads as the reranker's
            ``extra_heads``, so that the engine holds them from the start.
        allowed_hosts: what a request's Host header may name, or None for anything; a service
            without a key that listens on loopback should have `LOCAL_HOSTS`, or web pages could
            reach it through a name of their own.
        engine_died: called once when the engine is gone.

    ``app.state.workload`` is the `Workload`.
    """
    settings = settings or ServiceSettings()
    metrics = Metrics()
    workload = Workload(reranker, settings, metrics)

    async def watch() -> None:
        while workload.check_engine():
            await asyncio.sleep(WATCH_S)
        engine_died()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()

    app = FastAPI(
        title="core-rerank",
        version=__version__,
        summary="Reranking by the attention of a language model's retrieval heads",
        lifespan=lifespan,
    )
    app.state.workload = workload
    install(app)
    app.include_router(RankRoutes(workload, settings).router)
    app.include_router(detection_router(workload, settings, metrics, detector))
    app.include_router(operations_router(workload, settings, metrics, detector))
    app.include_router(page_router())
    if settings.openai:
        app.router.routes.extend(openai_routes(workload, settings))
    if settings.admin_tokens:
        app.include_router(programs_router(generating_backend(reranker), settings))
    app.add_middleware(Gate, settings=settings, metrics=metrics, allowed_hosts=allowed_hosts)
    return app
