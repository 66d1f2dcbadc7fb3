"""A `Reranker` for BEIR's scripts: an object with the signature of ``beir.reranking.Rerank``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from core_rerank.inputs import check_count
from core_rerank.types import Document

if TYPE_CHECKING:
    from core_rerank.reranker import Reranker


class BeirReranker:
    """Reranks BEIR's dictionaries; a query's task is a `Reranker`'s.

    Example::

        with Reranker() as reranker:
            reranked = BeirReranker(reranker).rerank(corpus, queries, results, top_k=40)
        ndcg, _map, recall, precision = EvaluateRetrieval.evaluate(qrels, reranked, [10])
    """

    def __init__(self, reranker: Reranker, *, batch: int = 8, progress: bool = False) -> None:
        """``batch`` queries go to the engine at once; ``progress`` shows a bar on stderr."""
        self._reranker = reranker
        self._batch = check_count("batch", batch)
        self._progress = progress

    def rerank(
        self,
        corpus: Mapping[str, Mapping[str, str]],
        queries: Mapping[str, str],
        results: Mapping[str, Mapping[str, float]],
        top_k: int,
    ) -> dict[str, dict[str, float]]:
        """Scores of each query's ``top_k`` documents with the highest scores in ``results``.

        Args:
            corpus: documents by id, with ``text`` and perhaps ``title``.
            queries: texts by id.
            results: query id -> document id -> the first stage's score; not changed.
            top_k: how many to rerank, from 1; the others are left out.

        Returns:
            Query id -> document id -> score, best first; every query of ``results`` is in it.

        Raises:
            KeyError: a query or document of ``results`` is not there.
            ValueError: ``top_k`` below 1, or as ``Reranker.rerank_batch`` raises.
        """
        from tqdm import tqdm

        top_k = check_count("top_k", top_k)
        query_ids = [query_id for query_id in results if results[query_id]]
        reranked: dict[str, dict[str, float]] = {query_id: {} for query_id in results}
        with tqdm(
            total=len(query_ids), desc="reranking", unit="query", disable=not self._progress
        ) as bar:
            for start in range(0, len(query_ids), self._batch):
                part = query_ids[start : start + self._batch]
                tasks = [(queries[q], _documents(corpus, results[q], top_k)) for q in part]
                for query_id, ranking in zip(part, self._reranker.rerank_batch(tasks), strict=True):
                    reranked[query_id] = {str(item.doc_id): item.score for item in ranking}
                bar.update(len(part))
        return reranked


def _documents(
    corpus: Mapping[str, Mapping[str, str]], scores: Mapping[str, float], top_k: int
) -> list[Document]:
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:top_k]
    return [Document(corpus[d].get("text") or "", d, corpus[d].get("title") or None) for d in best]
