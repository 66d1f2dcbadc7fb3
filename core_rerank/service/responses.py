"""The bodies of answers, one function a format; JSON has no NaN, and so they take none."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, FiniteFloat

from core_rerank.types import RankedDocument, Ranking

if TYPE_CHECKING:
    from core_rerank.injection import Detection


class CohereResult(BaseModel):
    """Where a document was in the request, and its relevance from 0 to 1.

    ``injection`` and ``flagged`` are ours, where ``screen`` was asked for.
    """

    index: int
    relevance_score: FiniteFloat
    injection: FiniteFloat | None = None
    flagged: bool | None = None


class CohereMeta(BaseModel):
    """What was done, and what the caller should know of it."""

    api_version: dict[str, str]
    billed_units: dict[str, int]
    tokens: dict[str, int]
    warnings: list[str] | None = None


class CohereV2Response(BaseModel):
    """Cohere v2's answer; it never holds a document's text.

    ``dropped``, by place in the request, is ours, where ``screen`` was asked for.
    """

    id: str
    results: list[CohereResult]
    meta: CohereMeta
    dropped: list[int] | None = None


class TextOut(BaseModel):
    """A document's text."""

    text: str


class RerankResult(BaseModel):
    """One document of a ranking; ``truncated`` where the model read only its beginning.

    With ``screen``, ``injection`` is how suspicious it is, in [0, 1], which a blank one has not,
    and ``flagged`` whether that is above the threshold.
    """

    index: int
    relevance_score: FiniteFloat
    document: TextOut | None = None
    truncated: bool | None = None
    injection: FiniteFloat | None = None
    flagged: bool | None = None


class Usage(BaseModel):
    """Tokens of the prompts that asked the query."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(BaseModel):
    """The answer of Jina, with vLLM's and infinity's ``id``; ``dropped`` where it was screened."""

    id: str
    object: str = "list"
    model: str
    usage: Usage
    results: list[RerankResult]
    dropped: list[int] | None = None


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


class DetectResult(BaseModel):
    """One piece of data: ``score`` in [0, 1], higher is more suspicious.

    ``focus_by_head``: the share of each head's attention that stays on the instruction.
    """

    index: int
    score: FiniteFloat
    flagged: bool
    focus_by_head: dict[str, FiniteFloat]


class DetectResponse(BaseModel):
    """The answer of ``/v1/detect``, in the request's order."""

    id: str
    model: str
    threshold: FiniteFloat
    results: list[DetectResult]


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


def cohere_v2(
    ranking: Ranking, request_id: str, warnings: Sequence[str], screened: bool = False
) -> CohereV2Response:
    """Cohere v2's shape."""
    cut = [item.index for item in ranking if item.truncated]
    told = [*warnings, *([_cut_warning(cut)] if cut else [])]
    return CohereV2Response(
        id=request_id,
        results=[
            CohereResult(
                index=item.index,
                relevance_score=relevance(item.score),
                injection=item.injection,
                flagged=item.flagged if screened else None,
            )
            for item in ranking
        ],
        meta=CohereMeta(
            api_version={"version": "2"},
            billed_units={"search_units": 1},
            tokens={"input_tokens": ranking.prompt_tokens, "output_tokens": 0},
            warnings=told or None,
        ),
        dropped=list(ranking.dropped) if screened else None,
    )


def jina(
    ranking: Ranking,
    request_id: str,
    *,
    raw_scores: bool,
    texts: Sequence[str] | None,
    screened: bool = False,
) -> RerankResponse:
    """Jina's shape; ``texts`` are the request's, or None where they are not to be echoed."""

    def result(item: RankedDocument) -> RerankResult:
        return RerankResult(
            index=item.index,
            relevance_score=relevance(item.score, raw_scores),
            document=None if texts is None else TextOut(text=texts[item.index]),
            truncated=True if item.truncated else None,
            injection=item.injection,
            flagged=item.flagged if screened else None,
        )

    return RerankResponse(
        id=request_id,
        model=ranking.model,
        usage=usage([ranking]),
        results=[result(item) for item in ranking],
        dropped=list(ranking.dropped) if screened else None,
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


def detected(found: Sequence[Detection], request_id: str, model: str) -> DetectResponse:
    """What was found in each piece of data; there is at least one."""
    return DetectResponse(
        id=request_id,
        model=model,
        threshold=found[0].threshold,
        results=[
            DetectResult(
                index=i,
                score=one.score,
                flagged=one.flagged,
                focus_by_head={str(head): value for head, value in one.focus_by_head.items()},
            )
            for i, one in enumerate(found)
        ],
    )


def explained(ranking: Ranking, request_id: str, screened: bool = False) -> dict[str, Any]:
    """``Ranking.to_dict`` with the request's id; JSON-safe."""
    dropped = {"dropped": list(ranking.dropped)} if screened else {}
    return {"id": request_id, **ranking.to_dict(), **dropped}


def usage(rankings: Sequence[Ranking]) -> Usage:
    """The tokens of all prompts."""
    tokens = sum(ranking.prompt_tokens for ranking in rankings)
    return Usage(prompt_tokens=tokens, total_tokens=tokens)


def _cut_warning(cut: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(cut)[:20])) + (", ..." if len(cut) > 20 else "")
    return f"read only the beginning of {len(cut)} documents (index {shown})"
