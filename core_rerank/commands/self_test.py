"""A ranking with a known answer, on the real backend."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .checks import FAIL, OK, Check
from .engine import running

if TYPE_CHECKING:
    from core_rerank.reranker import Reranker
    from core_rerank.types import Ranking

QUERY = "What is the capital of France?"
DOCUMENTS = {
    "bread": "Sourdough bread rises with wild yeast that is kept alive in a starter.",
    "paris": "Paris is the capital of France and lies on the river Seine.",
    "tides": "The tides of the ocean follow the pull of the moon and the sun.",
}
EXPECTED = "paris"
# A repeated call reads the prefix cache: bfloat16 may round otherwise, a fault is far larger.
SAME = 0.02
REPORT = "please report it with the output of core-rerank doctor -v"


def self_test(model: str, backend: str, verbose: bool) -> list[Check]:
    """Start the backend, rank three documents twice, and say whether the answer is right."""
    from core_rerank.heads import find_head_set
    from core_rerank.models import resolve_model

    known = find_head_set(resolve_model(model).model_id) is not None
    started = time.perf_counter()
    with running(model, backend, {"strategy": "core" if known else "icr"}, verbose) as reranker:
        seconds = time.perf_counter() - started
        info = reranker.model
        what = (
            f"{info.backend} runs {info.layers_kept} of {info.num_layers} layers in {info.dtype} "
            f"on {info.device}; started in {seconds:.0f} s"
        )
        return [Check(OK, "engine", what), *_known_answer(reranker)]


def _known_answer(reranker: Reranker) -> list[Check]:
    first, second = (
        reranker.rerank(QUERY, list(DOCUMENTS.values()), doc_ids=list(DOCUMENTS)) for _ in range(2)
    )
    scores = ", ".join(f"{item.doc_id} {item.score:.4g}" for item in first)
    right = first[0].doc_id == EXPECTED
    repeated = _same(first, second)
    return [
        Check(OK, "self-test", f"{EXPECTED!r} is first of {len(first)} ({scores})")
        if right
        else Check(FAIL, "self-test", f"{EXPECTED!r} is not first ({scores})", REPORT),
        Check(OK, "repeated call", "gives the same scores")
        if repeated
        else Check(FAIL, "repeated call", "gives other scores", REPORT),
    ]


def _same(first: Ranking, second: Ranking) -> bool:
    before = {item.index: item.score for item in first}
    scale = max(abs(score) for score in before.values())
    return all(abs(before[item.index] - item.score) <= SAME * scale for item in second)
