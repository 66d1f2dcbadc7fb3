"""The endpoints for whoever runs the service: health, readiness, what it is, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from core_rerank import __version__

from .metrics import Metrics
from .settings import ServiceSettings
from .workload import Workload

if TYPE_CHECKING:
    from core_rerank.injection import InjectionDetector


def operations_router(
    workload: Workload,
    settings: ServiceSettings,
    metrics: Metrics,
    detector: InjectionDetector | None = None,
) -> APIRouter:
    """Endpoints over one workload."""
    router = APIRouter(tags=["operations"])
    reranker = workload.reranker

    @router.get("/health")
    async def health() -> dict[str, str]:
        """200 while the process answers; whether it takes requests is for ``/ready``."""
        return {"status": "alive"}

    @router.get("/ready", responses={503: {"description": "No request is taken."}})
    async def ready() -> Response:
        """200 while requests are taken; 503 with the reason when stopping or without an engine."""
        workload.check_engine()
        if workload.ended is None:
            return JSONResponse({"status": "ready"})
        body = {"status": "not ready", "reason": workload.ended.message}
        return JSONResponse(body, 503)

    @router.get("/info")
    async def info() -> dict[str, Any]:
        """The model, how it ranks, and the limits; TEI's names where it has them."""
        model = reranker.model
        return {
            "version": __version__,
            "model_id": reranker.model_id,
            "model_sha": model.revision,
            "model_dtype": model.dtype,
            "model_type": {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}},
            "served_names": list(settings.served_names),
            "backend": model.backend,
            "device": model.device,
            "strategy": reranker.strategy,
            "window": reranker.window,
            "heads": None if reranker.heads is None else [str(head) for head in reranker.heads],
            "max_input_length": reranker.max_tokens_per_doc,
            "max_client_batch_size": settings.max_documents,
            "max_concurrent_requests": workload.max_running + settings.max_waiting,
            "max_body_bytes": settings.max_body_bytes,
            "timeout_s": settings.timeout_s,
            "auto_truncate": True,
            "openai": settings.openai,
            "screen_threshold": reranker.screen.threshold if reranker.screen else None,
            "detect_threshold": detector.threshold if detector else None,
        }

    @router.get("/metrics")
    async def prometheus() -> Response:
        """Counters in Prometheus' text format."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router
