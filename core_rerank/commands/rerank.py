"""``core-rerank rerank``: rank the documents of a file by their relevance to a query."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from core_rerank.types import Ranking

from .documents import read_documents
from .engine import rank, running
from .options import (
    DEFAULT_MODEL,
    Backend,
    BackendOption,
    DtypeOption,
    HeadsOption,
    ModelOption,
    ScreenHeadsOption,
    Strategy,
    StrategyOption,
    VerboseOption,
    WindowOption,
    window_value,
)
from .terminal import (
    CommandError,
    check_output,
    errors_as_messages,
    out,
    say,
    write_text,
)


class Format(StrEnum):
    """How documents are written down."""

    TXT = "txt"
    JSONL = "jsonl"


def rerank(
    query: Annotated[str, typer.Argument(help="What is asked.", show_default=False)],
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE|-",
            help="Documents: .txt (one a line; the id is the line number) or .jsonl (text, and if "
            "wanted _id and title); - reads stdin.",
            show_default=False,
        ),
    ],
    top_n: Annotated[
        int | None, typer.Option("--top-n", min=1, help="Show only the best N. Default: all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    explain: Annotated[
        Path | None,
        typer.Option("--explain", metavar="HTML", help="Write a page that shades every token."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="Default: by extension, or by the first line.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    window: WindowOption = None,
    backend: BackendOption = Backend.VLLM,
    heads_config: HeadsOption = None,
    strategy: StrategyOption = Strategy.CORE,
    dtype: DtypeOption = None,
    screen: Annotated[
        bool,
        typer.Option(
            "--screen",
            help="Score each document for orders planted in it, and mark suspicious ones.",
        ),
    ] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="With --screen: leave suspicious documents out.")
    ] = False,
    screen_heads: ScreenHeadsOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Rank the documents of FILE by how much attention QUERY pays them, best first."""
    with errors_as_messages(verbose):
        _check_query(query)
        if explain is not None:
            check_output(explain)
        if not screen and (drop or screen_heads is not None):
            raise CommandError("--drop and --screen-heads have an effect with --screen only.")
        documents = read_documents(file, form.value if form else None)
        options = {
            "config": heads_config,
            "window": window_value(window) if window else None,
            "strategy": strategy.value,
            **({"dtype": dtype.value} if dtype else {}),
            **({"screen": "drop" if drop else "flag"} if screen else {}),
            **({"screen_heads": screen_heads} if screen_heads else {}),
        }
        if documents:
            with running(model, backend.value, options, verbose) as reranker:
                tasks = [(query, documents)]
                (ranking,) = rank(reranker, tasks, top_n=top_n, explain=explain is not None)
        else:
            say(f"{'stdin' if file == '-' else file} holds no documents.", "yellow")
            ranking = Ranking(query, (), model, strategy.value)
        if explain is not None:
            write_text(explain, ranking.to_html())
            say(f"explain page: {explain}")
        if ranking.dropped:
            say(f"{len(ranking.dropped)} suspicious documents were left out.", "yellow")
        _print(ranking, as_json)


def _print(ranking: Ranking, as_json: bool) -> None:
    if as_json:
        from core_rerank.html import replace_surrogates

        typer.echo(replace_surrogates(json.dumps(ranking.to_dict(), ensure_ascii=False)))
    elif ranking:
        from .tables import ranking_table

        out().print(ranking_table(ranking))


def _check_query(query: str) -> None:
    if not query.strip():
        raise CommandError("the query is empty: give the words to search for.")
    try:
        query.encode("utf-8")
    except UnicodeEncodeError:
        raise CommandError("the query is not valid UTF-8: check the terminal's locale.") from None
