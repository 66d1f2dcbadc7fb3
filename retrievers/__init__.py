"""First-stage retrievers: from a corpus and queries to candidates for reranking."""

from .base import Retriever, Run
from .bm25 import BM25Retriever
from .corpus import Corpus
from .dense import DenseRetriever
from .encoder import Encoder, SentenceEncoder
from .factory import index_or_load, load_retriever, make_retriever
from .hybrid import HybridRetriever, reciprocal_rank_fusion
from .llama_index import as_llama_index
from .run_file import RunFileRetriever, read_run, run_lines
from .vectors import FaissSettings

__all__ = [
    "BM25Retriever",
    "Corpus",
    "DenseRetriever",
    "Encoder",
    "FaissSettings",
    "HybridRetriever",
    "Retriever",
    "Run",
    "RunFileRetriever",
    "SentenceEncoder",
    "as_llama_index",
    "index_or_load",
    "load_retriever",
    "make_retriever",
    "read_run",
    "reciprocal_rank_fusion",
    "run_lines",
]
