"""CoreRerankRanker: a Haystack ranker component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from core_rerank.errors import MissingDependencyError
from core_rerank.inputs import check_count
from core_rerank.reranker import Reranker
from core_rerank.settings import check_strategy, check_window

from .source import DEFAULT_TIMEOUT_S, LocalSource, Scored, open_source

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.utils import Secret, deserialize_secrets_inplace
except ImportError as error:
    raise MissingDependencyError(
        f"CoreRerankRanker needs haystack-ai ({error}). "
        "To install it: pip install 'core-rerank[haystack]'."
    ) from None


@component
class CoreRerankRanker:
    """Ranks documents by the attention that the query pays to them.

    Documents given are never changed. Of several with one id the one with the highest score is
    ranked. A document without content counts as empty, and ranks last.
    """

    def __init__(
        self,
        model: str | None = None,
        top_k: int = 10,
        *,
        window: int | str | None = None,
        strategy: str | None = None,
        score_threshold: float | None = None,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        base_url: str | None = None,
        api_key: Secret | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        settings: dict[str, Any] | None = None,
        reranker: Reranker | None = None,
    ) -> None:
        """Settings as in `core_rerank.integrations.llama_index.CoreRerank`; loads nothing yet.

        Args:
            model: see there.
            top_k: how many documents to return at most.
            window: see there.
            strategy: see there.
            score_threshold: documents that score less are left out; 0.0 is a threshold too.
            meta_fields_to_embed: values put before the content; None values are skipped.
            embedding_separator: between those values and the content.
            base_url: see there.
            api_key: for the server; only one from an environment variable can be saved.
            timeout_s: see there.
            settings: see there.
            reranker: a running one, which stays the caller's to close and is not saved.

        Raises:
            ValueError: a setting is wrong, or does not go with ``reranker`` or ``base_url``.
        """
        self.model = model
        self.top_k = check_count("top_k", top_k)
        self.window = None if window is None else check_window(window)
        self.strategy = None if strategy is None else check_strategy(strategy).name
        self.score_threshold = score_threshold
        self.meta_fields_to_embed = list(meta_fields_to_embed or ())
        self.embedding_separator = embedding_separator
        self.base_url = base_url
        self.api_key = api_key
        self.timeout_s = timeout_s
        self.settings = dict(settings or {})
        self._source = open_source(
            model=model,
            reranker=reranker,
            base_url=base_url,
            api_key=api_key.resolve_value() if api_key else None,
            timeout_s=timeout_s,
            settings={"window": self.window, "strategy": self.strategy, **self.settings},
        )
        self._warm = not isinstance(self._source, LocalSource)  # the others run elsewhere already

    def warm_up(self) -> None:
        """Start the engine, which the first ``run`` would do otherwise; once it runs, nothing.

        Pipelines call this at each of their runs.
        """
        if not self._warm:
            self._source.rank("warm up", ["warm up"])
            self._warm = True

    async def warm_up_async(self) -> None:
        """As ``warm_up``, leaving the event loop free meanwhile."""
        if not self._warm:
            await self._source.arank("warm up", ["warm up"])
            self._warm = True

    @component.output_types(documents=list[Document])
    def run(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, list[Document]]:
        """``{"documents": ...}``: new documents with scores, best first.

        ``top_k`` and ``score_threshold`` win over those of the component.
        """
        limit = self._limit(top_k)
        unique = _unique(documents)
        if not unique:
            return {"documents": []}
        found = self._source.rank(query, self._texts(unique), limit)
        return {"documents": self._chosen(unique, found, score_threshold)}

    @component.output_types(documents=list[Document])
    async def run_async(
        self,
        query: str,
        documents: list[Document],
        top_k: int | None = None,
        score_threshold: float | None = None,
    ) -> dict[str, list[Document]]:
        """As ``run``, leaving the event loop free meanwhile."""
        limit = self._limit(top_k)
        unique = _unique(documents)
        if not unique:
            return {"documents": []}
        found = await self._source.arank(query, self._texts(unique), limit)
        return {"documents": self._chosen(unique, found, score_threshold)}

    def to_dict(self) -> dict[str, Any]:
        """Everything but a running reranker, in the types of JSON and YAML."""
        return default_to_dict(
            self,
            model=self.model,
            top_k=self.top_k,
            window=self.window,
            strategy=self.strategy,
            score_threshold=self.score_threshold,
            meta_fields_to_embed=self.meta_fields_to_embed,
            embedding_separator=self.embedding_separator,
            base_url=self.base_url,
            api_key=self.api_key.to_dict() if self.api_key else None,
            timeout_s=self.timeout_s,
            settings=self.settings,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CoreRerankRanker:
        """The component that ``to_dict`` described."""
        given = data.get("init_parameters", {})
        if given.get("api_key"):
            deserialize_secrets_inplace(given, keys=["api_key"])
        return default_from_dict(cls, data)

    def _limit(self, top_k: int | None) -> int:
        return self.top_k if top_k is None else check_count("top_k", top_k)

    def _texts(self, documents: Sequence[Document]) -> list[str]:
        return [
            self.embedding_separator.join(
                [
                    *(
                        str(document.meta[name])
                        for name in self.meta_fields_to_embed
                        if document.meta.get(name) is not None
                    ),
                    document.content or "",
                ]
            )
            for document in documents
        ]

    def _chosen(
        self, documents: Sequence[Document], found: Sequence[Scored], threshold: float | None
    ) -> list[Document]:
        least = self.score_threshold if threshold is None else threshold
        return [
            replace(documents[index], score=score)
            for index, score, *_ in found
            if least is None or score >= least
        ]


def _unique(documents: Sequence[Document]) -> list[Document]:
    """One of each id, the one that scores highest, in the place of the first."""
    best: dict[str, Document] = {}
    for document in documents:
        known = best.setdefault(document.id, document)
        if document.score is not None and (known.score is None or document.score > known.score):
            best[document.id] = document
    return list(best.values())
