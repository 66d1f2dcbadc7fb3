"""``core-rerank index`` and ``search``: a first stage's index on disk, and candidates from it."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import VerboseOption
from .terminal import CommandError, check_output, errors_as_messages, quiet_engine, say, write_text

RETRIEVERS = "core_rerank.retrievers"


class Kind(StrEnum):
    """Which first stage."""

    BM25 = "bm25"
    DENSE = "dense"
    HYBRID = "hybrid"


class VectorIndex(StrEnum):
    """How vectors are searched."""

    FLAT = "flat"
    IVF = "ivf"
    HNSW = "hnsw"


def index(
    corpus: Annotated[
        Path,
        typer.Argument(
            help="A BEIR folder, or a .jsonl, .jsonl.gz or .parquet file of _id, title and text.",
            show_default=False,
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="Where the index goes.", show_default=False)],
    retriever: Annotated[Kind, typer.Option("--retriever", "-r")] = Kind.BM25,
    language: Annotated[
        str | None, typer.Option(help="ISO code, for BM25's stems and stop words. Default: auto.")
    ] = None,
    embedding_model: Annotated[
        str | None, typer.Option(help="Hugging Face id or folder. Default: all-minilm-l6-v2.")
    ] = None,
    vector_index: Annotated[
        VectorIndex | None, typer.Option(help="Exact, or approximate. Default: flat (exact).")
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Index CORPUS for `core-rerank search`; nothing happens if FOLDER is that index already."""
    with errors_as_messages(verbose):
        from core_rerank.beir import CorpusFile

        options: dict[str, Any] = {
            "language": language,
            "model": embedding_model,
            "vector_index": vector_index.value if vector_index else None,
        }
        given = {name: value for name, value in options.items() if value is not None}
        with quiet_engine(verbose):
            import_module(RETRIEVERS).index_or_load(
                retriever.value, CorpusFile(corpus), folder, progress=True, **given
            )
        say(f"index: {folder}")


def search(
    folder: Annotated[Path, typer.Argument(help="What `core-rerank index` wrote.")],
    query: Annotated[str | None, typer.Argument(help="What is asked.", show_default=False)] = None,
    queries: Annotated[
        Path | None,
        typer.Option(help="Instead of QUERY: a BEIR folder or a file like queries.jsonl."),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, help="Documents a query.")] = 10,
    output: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the run there, not to stdout."),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Search an index; prints a TREC run: query id, Q0, document id, rank, score, tag."""
    with errors_as_messages(verbose):
        if (query is None) == (queries is None):
            raise CommandError("give either a QUERY or --queries.")
        if output is not None:
            check_output(output)
        from core_rerank.beir import read_queries

        asked = {"query": query} if queries is None else read_queries(queries)
        module = import_module(RETRIEVERS)
        with quiet_engine(verbose):
            run = module.load_retriever(folder).search(asked, depth, progress=queries is not None)
        text = "".join(f"{line}\n" for line in module.run_lines(run, "first-stage"))
        if output is None:
            typer.echo(text, nl=False)
        else:
            write_text(output, text)
