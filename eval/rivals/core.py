"""core-rerank as a ranker like the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, ModelInfo

from .base import RankerResult, Task


class CoreRanker:
    """A `core_rerank.Reranker` on a running backend, whose prompts' tokens are counted."""

    name = "core-rerank"

    def __init__(self, backend: CaptureBackend, **settings: Any) -> None:
        """``settings``: the Reranker's own, such as ``heads`` and ``window``."""
        from core_rerank.reranker import Reranker

        self._backend = _Counting(backend)
        self._reranker = Reranker(backend=self._backend, **settings)

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        """Order the documents of one query."""
        return self.rank_batch([(query, documents)])[0]

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        """All queries in one engine batch; its tokens are shared out evenly."""
        if not tasks:
            return []
        self._backend.tokens = 0
        start = time.perf_counter()
        rankings = self._reranker.rerank_batch([(query, list(texts)) for query, texts in tasks])
        seconds = (time.perf_counter() - start) / len(tasks)
        tokens = round(self._backend.tokens / len(tasks))
        results = []
        for ranking in rankings:
            scores = {document.index: document.score for document in ranking}
            in_place = tuple(scores[place] for place in range(len(scores)))
            results.append(RankerResult(tuple(scores), in_place, seconds, tokens))
        return results


class _Counting:
    """Passes everything on, and counts the tokens of the prompts."""

    def __init__(self, backend: CaptureBackend) -> None:
        self._backend = backend
        self.tokens = 0

    @property
    def model(self) -> ModelInfo:
        return self._backend.model

    @property
    def tokenizer(self) -> Any:
        return self._backend.tokenizer

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        self.tokens += sum(len(request.prompt_token_ids) for request in requests)
        return self._backend.capture(requests, progress=progress)

    def close(self) -> None:
        self._backend.close()
