"""``core-rerank demo``: three queries, real topics, and the tokens that earned each score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .engine import rank, running
from .options import DEFAULT_MODEL, Backend, BackendOption, ModelOption, VerboseOption
from .terminal import (
    FAILURE,
    CommandError,
    check_output,
    errors_as_messages,
    out,
    write_text,
)

if TYPE_CHECKING:
    from core_rerank.types import Ranking

PAGE = "demo.html"


def demo(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="HTML", help="Default: in the user's data folder."),
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    backend: BackendOption = Backend.VLLM,
    verbose: VerboseOption = False,
) -> None:
    """Rank 8 documents for each of 3 queries; exit code 1 if an expected one is not first."""
    with errors_as_messages(verbose):
        page = _page(output)
        from .demo_data import DEMO

        rankings = _rank(model, backend.value, verbose)
        from .tables import ranking_table

        console = out()
        for ranking, item in zip(rankings, DEMO, strict=True):
            console.print(ranking_table(ranking, mark=item.expected))
            console.print()
        from core_rerank.html import render_all

        write_text(page, render_all(rankings))
        right = sum(
            ranking[0].doc_id == item.expected for ranking, item in zip(rankings, DEMO, strict=True)
        )
        typer.echo(
            f"demo: {right} of {len(DEMO)} queries ranked the expected document first; "
            f"explain page: {page}"
        )
        if right < len(DEMO):
            raise typer.Exit(FAILURE)


def _page(output: Path | None) -> Path:
    if output is not None:
        check_output(output)
        return output
    from platformdirs import user_data_dir

    folder = Path(user_data_dir("core-rerank", appauthor=False))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"cannot create {folder} for the explain page ({error.strerror}): use --output.",
            FAILURE,
        ) from None
    return folder / PAGE


def _rank(model: str, backend: str, verbose: bool) -> list[Ranking]:
    from .demo_data import DEMO

    with running(model, backend, {}, verbose) as reranker:
        return rank(reranker, [(item.query, item.documents) for item in DEMO], explain=True)
