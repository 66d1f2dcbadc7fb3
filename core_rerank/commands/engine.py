"""Starts a reranker for a command, with progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .terminal import CommandError, err, quiet_engine, say, working

if TYPE_CHECKING:
    from core_rerank.reranker import Documents, Reranker
    from core_rerank.types import Ranking


@contextmanager
def running(
    model: str, backend: str, options: Mapping[str, Any], verbose: bool
) -> Iterator[Reranker]:
    """A reranker that is closed afterwards; the engine keeps quiet meanwhile."""
    with quiet_engine(verbose), _start(model, backend, options) as reranker:
        yield reranker


@contextmanager
def starting(
    model: str, backend: str, options: Mapping[str, Any], verbose: bool
) -> Iterator[Reranker]:
    """As `running`, but only until it has started does the engine keep this process quiet."""
    with quiet_engine(verbose):
        reranker = _start(model, backend, options)
    with reranker:
        yield reranker


def _start(model: str, backend: str, options: Mapping[str, Any]) -> Reranker:
    from core_rerank.models import resolve_model
    from core_rerank.reranker import Reranker

    # Fetches what is missing, with a progress bar of its own.
    _check_heads(resolve_model(model).model_id, options)
    with working(f"Starting {model} on {backend}"):
        return Reranker(model, backend=backend, **options)


def _check_heads(model_id: str, options: Mapping[str, Any]) -> None:
    """What `Reranker` refuses, in the words of the command line."""
    from core_rerank.heads import find_head_set
    from core_rerank.scoring import STRATEGIES

    name, config = options.get("strategy", "core"), options.get("config")
    reads_all = STRATEGIES[name].heads == "all"
    if reads_all and config is not None:
        raise CommandError(f"--strategy {name} reads every head: leave out --heads-config.")
    if not reads_all and config is None and find_head_set(model_id) is None:
        raise CommandError(
            f"no head set is known for {model_id}. Find its heads with `core-rerank detect-heads` "
            "and give them to `core-rerank rerank` with --heads-config, or use its "
            "--strategy icr, which reads every head."
        )


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
