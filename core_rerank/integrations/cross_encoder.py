"""CoreCrossEncoder: what sentence-transformers' CrossEncoder is called by, and so BEIR's Rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from core_rerank.inputs import check_count
from core_rerank.reranker import Reranker

if TYPE_CHECKING:
    import numpy as np


class CoreCrossEncoder:
    """``rank`` and ``predict`` as of ``sentence_transformers.CrossEncoder``, on a `Reranker`.

    Scores are sums of attention: they compare for one query only, and may be negative.

        beir.reranking.Rerank(CoreCrossEncoder(reranker)).rerank(corpus, queries, results, top_k)
    """

    def __init__(self, reranker: Reranker) -> None:
        """``reranker`` stays the caller's to close; ValueError for one that drops documents."""
        if reranker.screen is not None and reranker.screen.drop:
            raise ValueError(
                "this reranker drops documents, and a cross-encoder scores every pair: give one "
                "with screen='flag' or without a screen."
            )
        self._reranker = reranker

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,
        *,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
    ) -> list[dict[str, Any]]:
        """``{"corpus_id": place, "score": float}`` best first, and ``"text"`` if asked.

        ``batch_size`` changes nothing: the engine makes its own batches.
        """
        top_n = None if top_k is None else check_count("top_k", top_k)
        tasks = [(query, documents)]
        (ranking,) = self._reranker.rerank_batch(
            tasks, top_n=top_n, progress=bool(show_progress_bar)
        )
        found: list[dict[str, Any]] = []
        for item in ranking:
            entry = {"corpus_id": item.index, "score": item.score}
            found.append({**entry, "text": item.document.text} if return_documents else entry)
        return found

    def predict(
        self,
        inputs: Sequence[Sequence[str]],
        *,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        convert_to_numpy: bool = True,
    ) -> np.ndarray | np.float32 | list[float]:
        """The score of each (query, document) of ``inputs``, float32 [pairs]; of one pair, one.

        Pairs with the same query are ranked together, which with ``window="all"`` is one prompt.
        """
        import numpy as np

        single = len(inputs) == 2 and all(isinstance(text, str) for text in inputs)
        pairs: list[Any] = [inputs] if single else list(inputs)
        places: dict[Any, list[int]] = {}
        for place, pair in enumerate(pairs):
            if isinstance(pair, str) or len(pair) != 2 or not all(isinstance(t, str) for t in pair):
                raise TypeError(
                    f"pair {place} is not (query, document), two strings: {pair!r:.80}."
                )
            places.setdefault(pair[0], []).append(place)
        tasks = [(query, [pairs[i][1] for i in own]) for query, own in places.items()]
        scores = np.zeros(len(pairs), np.float32)
        rankings = self._reranker.rerank_batch(tasks, progress=bool(show_progress_bar))
        for own, ranking in zip(places.values(), rankings, strict=True):
            for item in ranking:
                scores[own[item.index]] = item.score
        if single:
            return scores[0]
        return scores if convert_to_numpy else [float(score) for score in scores]
