"""First-stage retrievers: from a corpus and queries to candidates for reranking."""

from .base import Retriever, Run
from .bm25 import BM25Retriever
from .corpus import Corpus

__all__ = ["BM25Retriever", "Corpus", "Retriever", "Run"]
