"""Cross-encoders: each document is read with the query and gets a score of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from core_rerank.errors import MissingDependencyError

from .base import RankerResult, Task, by_score

PLAIN = "{}"


class VllmScoreRanker:
    """A sequence classifier with one label, through vLLM's own ``LLM.score``.

    Args:
        engine: ``vllm.LLM`` started with ``runner="pooling"`` on such a model.
        query_form, document_form: what a query and a document become, with ``{}`` for the text:
            models trained on an instruction need theirs.
    """

    name = "cross-encoder (vLLM)"

    def __init__(self, engine: Any, query_form: str = PLAIN, document_form: str = PLAIN) -> None:
        self._engine = engine
        self._query_form = query_form
        self._document_form = document_form

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        """Order the documents of one query."""
        return self.rank_batch([(query, documents)])[0]

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        """All pairs of all queries in one call; pairs that are too long lose their end."""
        queries = [self._query_form.replace(PLAIN, q) for q, texts in tasks for _ in texts]
        documents = [
            self._document_form.replace(PLAIN, text) for _, texts in tasks for text in texts
        ]
        start = time.perf_counter()
        outputs = self._engine.score(
            queries,
            documents,
            use_tqdm=False,
            tokenization_kwargs={"truncate_prompt_tokens": -1, "truncation_side": "right"},
        )
        seconds = time.perf_counter() - start
        scores = [float(output.outputs.score) for output in outputs]
        tokens = [len(output.prompt_token_ids) for output in outputs]
        return _share_out(tasks, scores, tokens, seconds)


class SentenceTransformersRanker:
    """A ``sentence_transformers.CrossEncoder``.

    Args:
        model: a Hugging Face id or a local folder.
        batch_size: pairs computed at once.
        **options: the CrossEncoder's own, such as ``device`` and ``max_length``.

    Raises:
        MissingDependencyError: sentence-transformers is not installed.
    """

    def __init__(self, model: str, batch_size: int = 32, **options: Any) -> None:
        if find_spec("sentence_transformers") is None:
            raise MissingDependencyError(
                "this cross-encoder needs sentence-transformers, which is not installed. "
                "To install it: pip install 'core-rerank[dense]'."
            )
        from sentence_transformers import CrossEncoder

        self.name = f"cross-encoder ({model})"
        self._model = CrossEncoder(model, **options)
        self._batch_size = batch_size

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        """Order the documents of one query."""
        return self.rank_batch([(query, documents)])[0]

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        """All pairs of all queries, in the model's batches; pairs too long lose their end."""
        pairs = [(query, text) for query, texts in tasks for text in texts]
        start = time.perf_counter()
        scores = self._model.predict(pairs, batch_size=self._batch_size, show_progress_bar=False)
        seconds = time.perf_counter() - start
        tokenizer, limit = self._model.tokenizer, self._model.max_seq_length
        longest = {"truncation": True, "max_length": limit} if limit else {}
        ids = (
            tokenizer(*map(list, zip(*pairs, strict=True)), **longest)["input_ids"] if pairs else []
        )
        return _share_out(tasks, [float(score) for score in scores], list(map(len, ids)), seconds)


def _share_out(
    tasks: Sequence[Task], scores: Sequence[float], tokens: Sequence[int], seconds: float
) -> list[RankerResult]:
    """Each query's part of what was computed for all pairs, one after the other."""
    results, start = [], 0
    for _, texts in tasks:
        stop = start + len(texts)
        own = tuple(scores[start:stop])
        spent = sum(tokens[start:stop])
        results.append(RankerResult(by_score(own), own, seconds / len(tasks), spent))
        start = stop
    return results
