"""CoreRanker: a ranker of AnswerDotAI's ``rerankers`` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core_rerank.errors import MissingDependencyError
from core_rerank.reranker import Reranker

from .source import DEFAULT_TIMEOUT_S, Scored, open_source

try:
    from rerankers.documents import Document
    from rerankers.models.ranker import BaseRanker
    from rerankers.results import RankedResults, Result
except ImportError as error:
    raise MissingDependencyError(
        f"CoreRanker needs rerankers ({error}). To install it: pip install rerankers."
    ) from None


class CoreRanker(BaseRanker):
    """``rank``, ``rank_async`` and ``score`` as of ``rerankers.Reranker``, inputs unchanged."""

    def __init__(
        self,
        model_name_or_path: str | None = None,
        verbose: int = 0,
        *,
        model: str | None = None,
        reranker: Reranker | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **settings: Any,
    ) -> None:
        """Where to rank: see `core_rerank.integrations.llama_index.CoreRerank`.

        ``model`` is another name for ``model_name_or_path``. ``settings`` are further arguments of
        `core_rerank.Reranker`; ``verbose`` changes nothing.
        """
        if model is not None and model_name_or_path not in (None, model):
            raise ValueError(
                f"model_name_or_path={model_name_or_path!r} and model={model!r} are two models: "
                "give one."
            )
        self.verbose = verbose
        self._source = open_source(
            model=model_name_or_path or model,
            reranker=reranker,
            base_url=base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            settings=settings,
        )

    def rank(
        self,
        query: str,
        docs: str | Document | Sequence[str | Document],
        doc_ids: Sequence[str] | Sequence[int] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> RankedResults:
        """All of ``docs``, best first; one document gives the same type as many, none as well.

        ``doc_ids`` are by default the documents' own, or their places.
        """
        documents = _documents(docs, doc_ids, metadata)
        found = self._source.rank(query, _texts(documents)) if documents else []
        return _results(query, documents, found)

    async def rank_async(
        self,
        query: str,
        docs: str | Document | Sequence[str | Document],
        doc_ids: Sequence[str] | Sequence[int] | None = None,
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> RankedResults:
        """As ``rank``, leaving the event loop free meanwhile."""
        documents = _documents(docs, doc_ids, metadata)
        found = await self._source.arank(query, _texts(documents)) if documents else []
        return _results(query, documents, found)

    def score(self, query: str, doc: str) -> float:
        """The score of one document."""
        return self._source.rank(query, [doc])[0].score


def _documents(
    docs: str | Document | Sequence[str | Document],
    doc_ids: Sequence[Any] | None,
    metadata: Sequence[dict[str, Any]] | None,
) -> list[Document]:
    given = [docs] if isinstance(docs, str | Document) else list(docs)
    for name, values in (("doc_ids", doc_ids), ("metadata", metadata)):
        if values is not None and len(values) != len(given):
            raise ValueError(f"{name} has {len(values)} entries for {len(given)} documents.")
    made = []
    for place, item in enumerate(given):
        known = item if isinstance(item, Document) else Document(item)
        own = place if known.doc_id is None else known.doc_id
        made.append(
            Document(
                known.text,
                doc_id=own if doc_ids is None else doc_ids[place],
                metadata=dict(known.metadata if metadata is None else metadata[place]),
            )
        )
    return made


def _texts(documents: Sequence[Document]) -> list[str]:
    return [document.text or "" for document in documents]


def _results(query: str, documents: Sequence[Document], found: Sequence[Scored]) -> RankedResults:
    results = [
        Result(documents[index], score, rank)
        for rank, (index, score, *_) in enumerate(found, start=1)
    ]
    return RankedResults(results, query, has_scores=True)
