"""CoreRerankCompressor: a LangChain document compressor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from core_rerank.errors import MissingDependencyError
from core_rerank.reranker import Reranker

from .source import DEFAULT_TIMEOUT_S, Scored, Source, open_source

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from pydantic import ConfigDict, Field, PrivateAttr, SecretStr
except ImportError as error:
    raise MissingDependencyError(
        f"CoreRerankCompressor needs langchain-core ({error}). "
        "To install it: pip install 'core-rerank[langchain]'."
    ) from None


class CoreRerankCompressor(BaseDocumentCompressor):
    """Keeps the ``top_n`` documents that the query pays the most attention to, best first.

    Documents given are never changed; what comes back are copies with
    ``metadata["relevance_score"]``. ``model``, ``window``, ``strategy``, ``base_url``, ``api_key``,
    ``timeout_s`` and ``settings`` are as in `core_rerank.integrations.llama_index.CoreRerank`;
    ``top_n=None`` keeps all, and a running ``reranker`` stays the caller's to close.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str | None = None
    top_n: int | None = Field(default=3, ge=1)
    window: int | Literal["all"] | None = None
    strategy: str | None = None
    base_url: str | None = None
    api_key: SecretStr | None = None
    timeout_s: float = Field(default=DEFAULT_TIMEOUT_S, gt=0)
    settings: dict[str, Any] = Field(default_factory=dict)
    reranker: Reranker | None = Field(default=None, exclude=True, repr=False)
    _source: Source = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Choose where to rank; loads nothing yet."""
        super().model_post_init(context)
        self._source = open_source(
            model=self.model,
            reranker=self.reranker,
            base_url=self.base_url,
            api_key=self.api_key.get_secret_value() if self.api_key else None,
            timeout_s=self.timeout_s,
            settings={"window": self.window, "strategy": self.strategy, **self.settings},
        )

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """The best ``top_n`` of ``documents``; ``callbacks`` are not called."""
        if not documents:
            return []
        found = self._source.rank(query, [d.page_content for d in documents], self.top_n)
        return _chosen(documents, found)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """As ``compress_documents``, leaving the event loop free meanwhile."""
        if not documents:
            return []
        found = await self._source.arank(query, [d.page_content for d in documents], self.top_n)
        return _chosen(documents, found)


def _chosen(documents: Sequence[Document], found: Sequence[Scored]) -> list[Document]:
    return [
        documents[index].model_copy(
            update={"metadata": {**documents[index].metadata, "relevance_score": score}}
        )
        for index, score, *_ in found
    ]
