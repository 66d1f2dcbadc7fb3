"""The endpoints that rank: each checks its format's request and writes its format's answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from core_rerank.types import Ranking, Screening

from . import responses
from .callers import gone, timeout_s
from .checks import check_count, check_model
from .errors import (
    BadRequest,
    EmptyRequest,
    InferenceFailed,
    Invalid,
    TEIInferenceFailed,
    TooLarge,
)
from .requests import (
    CohereV2Request,
    ExplainRequest,
    PlainRerankRequest,
    RerankRequest,
    ScoreRequest,
    TEIRequest,
    texts_of,
    titled,
)
from .responses import CohereV2Response, Problem, RerankResponse, ScoreResponse, TEIResult
from .settings import ServiceSettings
from .workload import RankTask, Workload

MAX_HEAD_NUMBERS = 1_000_000
PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem} for status in (400, 401, 404, 408, 413, 415, 422, 429, 500, 503, 504)
}


class RankRoutes:
    """Endpoints over one workload."""

    def __init__(self, workload: Workload, settings: ServiceSettings) -> None:
        self._workload = workload
        self._settings = settings
        self.router = APIRouter(responses=PROBLEMS, tags=["rerank"])
        add = self.router.add_api_route
        json_only = {"methods": ["POST"], "response_model_exclude_none": True}
        add("/v2/rerank", self.cohere_v2, response_model=CohereV2Response, **json_only)
        add("/v1/rerank", self.jina, response_model=RerankResponse, **json_only)
        add("/rerank", self.plain, response_model=RerankResponse | list[TEIResult], **json_only)
        for path in ("/score", "/v1/score"):
            add(path, self.score, response_model=ScoreResponse, **json_only)
        add("/v1/explain", self.explain, methods=["POST"], response_model=None)

    async def cohere_v2(self, body: CohereV2Request, request: Request) -> CohereV2Response:
        """Cohere v2: relevance from 0 to 1, best first; documents are never echoed."""
        check_model(body.model, self._workload, self._settings)
        screen = self._screen(body.screen)
        texts = texts_of(body.documents)
        check_count(texts, "documents", BadRequest, self._settings)
        (ranking,) = await self._run(
            request,
            [RankTask(body.query, texts, body.top_n, False, body.max_tokens_per_doc, screen)],
            body.priority,
        )
        told = self._told(body)
        return responses.cohere_v2(ranking, request.state.request_id, told, bool(screen))

    async def jina(self, body: RerankRequest, request: Request) -> RerankResponse:
        """Jina and Cohere v1, and the formats of vLLM and infinity."""
        check_model(body.model, self._workload, self._settings)
        screen = self._screen(body.screen)
        texts = texts_of(body.documents, body.rank_fields)
        check_count(texts, "documents", Invalid, self._settings)
        limit = body.max_tokens_per_doc or None
        task = RankTask(body.query, texts, body.top_n or None, False, limit, screen)
        (ranking,) = await self._run(request, [task], body.priority)
        return responses.jina(
            ranking,
            request.state.request_id,
            raw_scores=body.raw_scores,
            texts=texts if body.return_documents else None,
            screened=bool(screen),
        )

    async def plain(
        self, body: PlainRerankRequest, request: Request
    ) -> RerankResponse | list[TEIResult]:
        """With ``texts`` TEI's format, with ``documents`` Jina's."""
        if isinstance(body, RerankRequest):
            return await self.jina(body, request)
        try:
            return await self._tei(body, request)
        except InferenceFailed as error:
            raise TEIInferenceFailed(error.message) from error

    async def _tei(self, body: TEIRequest, request: Request) -> list[TEIResult]:
        check_count(body.texts, "texts", EmptyRequest, self._settings)
        (ranking,) = await self._run(request, [RankTask(body.query, body.texts)], body.priority)
        cut = [item.index for item in ranking if item.truncated]
        if cut and body.truncate is False:
            raise Invalid(
                f"texts[{min(cut)}] is longer than a document may be, and truncate is false: "
                "shorten it, or leave truncate out to have it cut.",
                field=f"texts[{min(cut)}]",
            )
        texts = body.texts if body.return_text else None
        return responses.tei(ranking, raw_scores=body.raw_scores, texts=texts)

    async def score(self, body: ScoreRequest, request: Request) -> ScoreResponse:
        """vLLM's scores, in the request's order: one query for all documents, or one for each."""
        check_model(body.model, self._workload, self._settings)
        queries, documents = body.sides()
        check_count(documents, "documents", BadRequest, self._settings)
        tasks = [RankTask(queries[0], documents)]
        if len(queries) > 1:
            tasks = [RankTask(q, [d]) for q, d in zip(queries, documents, strict=True)]
        rankings = await self._run(request, tasks, body.priority)
        return responses.scores(
            rankings,
            request.state.request_id,
            self._workload.reranker.model_id,
            raw=body.use_activation is False,
        )

    async def explain(self, body: ExplainRequest, request: Request) -> Response:
        """A ranking as ``Ranking.to_dict()`` gives it, with what every token earned."""
        check_model(body.model, self._workload, self._settings)
        screen = self._screen(body.screen)
        documents = titled(body.documents)
        check_count(documents, "documents", Invalid, self._settings)
        if body.by_head:
            self._check_head_numbers(len(documents), body.max_tokens_per_doc)
        explain = "heads" if body.by_head else True
        task = RankTask(body.query, documents, body.top_n, explain, body.max_tokens_per_doc, screen)
        (ranking,) = await self._run(request, [task], body.priority)
        # Long lists of tokens: written in a thread, or other requests would wait for it.
        answer_id = request.state.request_id
        text = await asyncio.to_thread(_explained_json, ranking, answer_id, bool(screen))
        return Response(text, media_type="application/json")

    async def _run(
        self, request: Request, tasks: Sequence[RankTask], priority: int
    ) -> list[Ranking]:
        return await self._workload.run(
            tasks,
            timeout_s=timeout_s(request, self._settings),
            client_gone=partial(gone, request.receive),
            priority=priority,
        )

    def _screen(self, wanted: Screening) -> Screening:
        """``wanted``, where the reranker can."""
        if wanted and self._workload.reranker.screen is None:
            raise Invalid(
                "screen: this service does not screen documents. Start it with --screen, so that "
                "its engine holds the heads, or leave screen out.",
                field="screen",
            )
        return wanted

    def _check_head_numbers(self, documents: int, tokens: int | None) -> None:
        """One number a head and token makes long answers: there may be so many of them."""
        reranker = self._workload.reranker
        model = reranker.model
        heads = len(reranker.heads or ()) or model.layers_kept * model.num_heads
        longest = min(tokens or reranker.max_tokens_per_doc, reranker.max_tokens_per_doc)
        if documents * heads * longest > MAX_HEAD_NUMBERS:
            raise TooLarge(
                f"by_head: {heads} heads for {documents} documents of up to {longest} tokens are "
                f"more than {MAX_HEAD_NUMBERS} numbers, which is the limit: send fewer documents "
                "or a smaller max_tokens_per_doc.",
                field="by_head",
            )

    def _told(self, body: CohereV2Request) -> list[str]:
        limit = self._workload.reranker.max_tokens_per_doc
        if body.max_tokens_per_doc is None or body.max_tokens_per_doc <= limit:
            return []
        return [f"max_tokens_per_doc is at most {limit} here"]


def _explained_json(ranking: Ranking, request_id: str, screened: bool) -> str:
    answer = responses.explained(ranking, request_id, screened)
    return json.dumps(answer, ensure_ascii=False, allow_nan=False)
