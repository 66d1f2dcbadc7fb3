"""Any first stage as a LlamaIndex retriever."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from core_rerank.errors import DataError, MissingDependencyError
from core_rerank.inputs import check_count
from core_rerank.types import Document

from .base import Retriever

if TYPE_CHECKING:
    from llama_index.core.retrievers import BaseRetriever


def as_llama_index(
    retriever: Retriever,
    documents: Mapping[str, Document],
    *,
    top_k: int = 10,
    query_ids: Mapping[str, str] | None = None,
) -> BaseRetriever:
    """A LlamaIndex ``BaseRetriever`` over a retriever that has its index.

    Nodes are ``TextNode``: the document's id is the node's, its text the node's text; its metadata
    and, if it has one, its ``title`` are the node's metadata. Scores are the retriever's own.
    ``retrieve`` and ``aretrieve`` (in a thread) both work; several at once must suit the model.

    Args:
        retriever: any first stage.
        documents: the corpus, for the texts; such as ``core_rerank.beir.read_corpus`` gives.
        top_k: how many nodes at most.
        query_ids: query text -> query id, which ``RunFileRetriever`` needs.

    Raises:
        MissingDependencyError: llama-index-core is not installed.
    """
    return _adapter_class()(retriever, documents, check_count("top_k", top_k), query_ids)


@cache
def _adapter_class() -> Any:
    """The adapter's class; made on first use, as llama-index-core is heavy and optional."""
    import asyncio

    try:
        from llama_index.core.retrievers import BaseRetriever
        from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
    except ImportError as error:
        raise MissingDependencyError(
            f"as_llama_index needs llama-index-core ({error}). "
            "To install it: pip install 'core-rerank[llama-index]'."
        ) from None

    class FirstStageRetriever(BaseRetriever):
        """A first stage behind LlamaIndex's interface."""

        def __init__(
            self,
            retriever: Retriever,
            documents: Mapping[str, Document],
            top_k: int,
            query_ids: Mapping[str, str] | None,
        ) -> None:
            self._retriever = retriever
            self._documents = documents
            self._top_k = top_k
            self._query_ids = query_ids
            super().__init__()

        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            text = query_bundle.query_str
            query_id = _query_id(text, self._query_ids)
            found = self._retriever.search({query_id: text}, self._top_k)[query_id]
            nodes = []
            for doc_id, score in found.items():
                document = _document(self._documents, doc_id)
                title = {"title": document.title} if document.title else {}
                node = TextNode(
                    id_=doc_id, text=document.text, metadata={**title, **document.metadata}
                )
                nodes.append(NodeWithScore(node=node, score=score))
            return nodes

        async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            return await asyncio.to_thread(self._retrieve, query_bundle)

    return FirstStageRetriever


def _query_id(text: str, query_ids: Mapping[str, str] | None) -> str:
    if query_ids is None:
        return text
    if text not in query_ids:
        raise DataError(f"query_ids has no id for the query {text!r:.80}.")
    return query_ids[text]


def _document(documents: Mapping[str, Document], doc_id: str) -> Document:
    if doc_id not in documents:
        raise DataError(
            f"document {doc_id!r} was found but is not among the {len(documents)} documents given: "
            "give the corpus that was indexed."
        )
    return documents[doc_id]
