"""Starts a reranker for a command, with progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .terminal import err, quiet_engine, say, working

if TYPE_CHECKING:
    from core_rerank.reranker import Documents, Reranker
    from core_rerank.types import Ranking


@contextmanager
def running(
    model: str, backend: str, options: Mapping[str, Any], verbose: bool
) -> Iterator[Reranker]:
    """A reranker that is closed afterwards; the engine keeps quiet meanwhile."""
    from core_rerank.models import resolve_model
    from core_rerank.reranker import Reranker

    with quiet_engine(verbose):
        resolve_model(model)  # fetches what is missing, with a progress bar of its own
        with working(f"Starting {model} on {backend}"):
            reranker = Reranker(model, backend=backend, **options)
        with reranker:
            yield reranker


def rank(
    reranker: Reranker,
    tasks: Sequence[tuple[str, Documents]],
    *,
    top_n: int | None = None,
    explain: bool = False,
) -> list[Ranking]:
    """``Reranker.rerank_batch`` with the engine's bar on a terminal."""
    documents = sum(len(list(given)) for _, given in tasks)
    queries = f" for {len(tasks)} queries" if len(tasks) > 1 else ""
    say(f"Ranking {documents} documents{queries}")
    return reranker.rerank_batch(tasks, top_n=top_n, explain=explain, progress=err().is_terminal)
