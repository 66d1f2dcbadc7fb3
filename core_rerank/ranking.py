"""From scored documents to a Ranking: order, ties, blanks and explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hook_runtime.specs import Span

from .inputs import RerankInput
from .scoring import DocumentScore
from .screening import Screen
from .types import RankedDocument, Ranking, TokenScore

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class ScoredDocument:
    """A document that was read: its place in the caller's list, score, and token offsets.

    ``heads``: by head, float64 [document tokens]; None where nobody asked. ``injection`` is how
    suspicious it is, None where it was not screened.
    """

    index: int
    score: DocumentScore
    truncated: bool
    offsets: tuple[Span, ...]
    heads: Mapping[str, np.ndarray] | None = None
    injection: float | None = None


def build_ranking(
    given: RerankInput,
    scored: Sequence[ScoredDocument],
    *,
    model: str,
    strategy: str,
    top_n: int | None,
    explain: bool,
    by_head: bool,
    prompt_tokens: int,
    screen: Screen | None = None,
) -> Ranking:
    """Best first, ties in input order; documents that were not read are blank and come last.

    A blank document's score is the lowest of the others, and at most 0. What ``screen`` flags and
    drops is in no place of the ranking, so that others move up.
    """
    best_first = sorted(scored, key=lambda s: (-s.score.score, s.index))
    read = {s.index: s for s in scored}
    blank = [index for index in range(len(given.documents)) if index not in read]
    lowest = min([0.0, *(s.score.score for s in scored)])
    flagged = {index for index, item in read.items() if _is_flagged(item, screen)}
    dropped = flagged if screen is not None and screen.drop else set()
    order = [i for i in (*(s.index for s in best_first), *blank) if i not in dropped][:top_n]
    documents = []
    for rank, index in enumerate(order, start=1):
        document, item = given.documents[index], read.get(index)
        tokens = _token_scores(document.full_text, item) if explain else None
        documents.append(
            RankedDocument(
                index=index,
                doc_id=given.doc_ids[index],
                score=item.score.score if item else lowest,
                rank=rank,
                document=document,
                truncated=item.truncated if item else False,
                blank=item is None,
                token_scores=tokens,
                head_scores=_head_scores(item) if by_head else None,
                injection=item.injection if item else None,
                flagged=index in flagged,
            )
        )
    return Ranking(
        given.query, tuple(documents), model, strategy, prompt_tokens, tuple(sorted(dropped))
    )


def _is_flagged(item: ScoredDocument, screen: Screen | None) -> bool:
    return screen is not None and item.injection is not None and item.injection > screen.threshold


def _head_scores(item: ScoredDocument | None) -> dict[str, tuple[float, ...]]:
    found = {} if item is None or item.heads is None else item.heads
    return {head: tuple(map(float, scores)) for head, scores in found.items()}


def _token_scores(text: str, item: ScoredDocument | None) -> tuple[TokenScore, ...]:
    if item is None:
        return ()
    return tuple(
        TokenScore(text[start:end], start, end, float(score), bool(kept))
        for (start, end), score, kept in zip(
            item.offsets, item.score.tokens, item.score.kept, strict=True
        )
    )
