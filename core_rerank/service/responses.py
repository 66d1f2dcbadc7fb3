"""The bodies of answers, one function a format; JSON has no NaN, and so they take none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, FiniteFloat

from core_rerank.types import RankedDocument, Ranking


class CohereResult(BaseModel):
    """Where a document was in the request, and its relevance from 0 to 1."""

    index: int
    relevance_score: FiniteFloat


class CohereMeta(BaseModel):
    """What was done, and what the caller should know of it."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]
    warnings: list[str] | None = None


class CohereV2Response(BaseModel):
    """Cohere v2's answer; it never holds a document's text."""

    id: str
    results: list[CohereResult]
    meta: CohereMeta


class TextOut(BaseModel):
    """A document's text."""

    text: str


class RerankResult(BaseModel):
    """One document of a ranking; ``truncated`` where the model read only its beginning."""

    index: int
    relevance_score: FiniteFloat
    document: TextOut | None = None
    truncated: bool | None = None


class Usage(BaseModel):
    """Tokens of the prompts that asked the query."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """The answer of Jina, with vLLM's and infinity's ``id``."""

    id: str
    object: str = "list"
    model: str
    usage: Usage
    results: list[RerankResult]


class TEIResult(BaseModel):
    """One item of TEI's bare array."""

    index: int
    score: FiniteFloat
    text: str | None = None


class ScoreItem(BaseModel):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: FiniteFloat


class ScoreResponse(BaseModel):
    """vLLM's answer, in the request's order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[ScoreItem]
    usage: Usage


class Problem(BaseModel):
    """An error, under the names that each client reads it by.

    Cohere's clients read ``message``, Jina's ``detail``, TEI's ``error`` and ``error_type``.
    """

    id: str
    message: str
    detail: str
    error: str
    error_type: str
    field: str | None = None


class OpenAIProblem(BaseModel):
    """An error as OpenAI's clients read it."""

    class Told(BaseModel):
        """What they read."""

        message: str
        type: str
        param: str | None = None
        code: int

    id: str
    error: Told


def relevance(score: float, raw: bool = False) -> float:
    """``score`` as it is, or its logistic function: above 0.5 where the sum is above 0."""
    if raw:
        return score
    if score >= 0:
        return 1.0 / (1.0 + math.exp(-score))
    return math.exp(score) / (1.0 + math.exp(score))


def cohere_v2(ranking: Ranking, request_id: str, warnings: Sequence[str]) -> CohereV2Response:
    """Cohere v2's shape."""
    cut = [item.index for item in ranking if item.truncated]
    told = [*warnings, *([_cut_warning(cut)] if cut else [])]
    return CohereV2Response(
        id=request_id,
        results=[
            CohereResult(index=item.index, relevance_score=relevance(item.score))
            for item in ranking
        ],
        meta=CohereMeta(
            api_version={"version": "2"},
            billed_units={"search_units": 1},
            tokens={"input_tokens": ranking.prompt_tokens, "output_tokens": 0},
            warnings=told or None,
        ),
    )


def jina(
    ranking: Ranking, request_id: str, *, raw_scores: bool, texts: Sequence[str] | None
) -> RerankResponse:
    """Jina's shape; ``texts`` are the request's, or None where they are not to be echoed."""

    def result(item: RankedDocument) -> RerankResult:
        return RerankResult(
            index=item.index,
            relevance_score=relevance(item.score, raw_scores),
            document=None if texts is None else TextOut(text=texts[item.index]),
            truncated=True if item.truncated else None,
        )

    return RerankResponse(
        id=request_id,
        model=ranking.model,
        usage=usage([ranking]),
        results=[result(item) for item in ranking],
    )


def tei(ranking: Ranking, *, raw_scores: bool, texts: Sequence[str] | None) -> list[TEIResult]:
    """TEI's shape."""
    return [
        TEIResult(
            index=item.index,
            score=relevance(item.score, raw_scores),
            text=None if texts is None else texts[item.index],
        )
        for item in ranking
    ]


def scores(rankings: Sequence[Ranking], request_id: str, model: str, raw: bool) -> ScoreResponse:
    """vLLM's shape: one ranking of all documents, or one of a single document for each pair."""
    if len(rankings) == 1:
        values = [item.score for item in sorted(rankings[0], key=lambda item: item.index)]
    else:
        values = [ranking[0].score for ranking in rankings]
    return ScoreResponse(
        id=f"embd-{request_id}",
        created=int(time.time()),
        model=model,
        data=[ScoreItem(index=i, score=relevance(value, raw)) for i, value in enumerate(values)],
        usage=usage(rankings),
    )


def explained(ranking: Ranking, request_id: str) -> dict[str, Any]:
    """``Ranking.to_dict`` with the request's id; JSON-safe."""
    return {"id": request_id, **ranking.to_dict()}


def usage(rankings: Sequence[Ranking]) -> Usage:
    """The tokens of all prompts."""
    tokens = sum(ranking.prompt_tokens for ranking in rankings)
    return Usage(prompt_tokens=tokens, total_tokens=tokens)


def _cut_warning(cut: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(cut)[:20])) + (", ..." if len(cut) > 20 else "")
    return f"read only the beginning of {len(cut)} documents (index {shown})"
