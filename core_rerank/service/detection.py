"""``/v1/detect``: whether data holds orders for the model, read on the engine that ranks."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request

from . import responses
from .callers import gone, timeout_s
from .checks import check_count, check_model
from .errors import Invalid, NotServed
from .metrics import Metrics
from .requests import DetectRequest
from .responses import DetectResponse
from .routes import PROBLEMS
from .settings import ServiceSettings
from .workload import Workload, failures_told

if TYPE_CHECKING:
    from core_rerank.injection import Detection, InjectionDetector


def detection_router(
    workload: Workload,
    settings: ServiceSettings,
    metrics: Metrics,
    detector: InjectionDetector | None,
) -> APIRouter:
    """The endpoint over one workload; without a ``detector`` it says so to whoever asks.

    Raises:
        ValueError: the detector reads on another engine than the reranker.
    """
    if detector is not None and detector.backend is not workload.reranker.backend:
        raise ValueError(
            "the detector must share the reranker's engine: make it as "
            "InjectionDetector(reranker.backend)."
        )
    router = APIRouter(responses=PROBLEMS, tags=["detect"])

    @router.post("/v1/detect")
    async def detect(body: DetectRequest, request: Request) -> DetectResponse:
        """How suspicious each piece of data is; all of a request's make one engine batch."""
        if detector is None:
            raise NotServed(
                "this service does not detect injections: start it with --detect, so that its "
                "engine holds the heads."
            )
        check_model(body.model, workload, settings)
        texts = body.texts()
        check_count(texts, "data", Invalid, settings)
        pairs = [(body.instruction, text) for text in texts]
        score = partial(detector.ascore_many, pairs, threshold=body.threshold)

        async def read(_: asyncio.Event) -> list[Detection]:
            with failures_told(workload, "data"):
                return await score()

        found = await workload.run_work(
            read,
            timeout_s=timeout_s(request, settings),
            client_gone=partial(gone, request.receive),
            priority=body.priority,
        )
        metrics.flagged.labels("detect").inc(sum(one.flagged for one in found))
        model = workload.reranker.model_id
        return responses.detected(found, request.state.request_id, model)

    return router
