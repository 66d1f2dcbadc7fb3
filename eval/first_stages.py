"""Measure first stages alone: nDCG@10, recall@20 and seconds on a BEIR folder.

Run as ``python -m core_rerank.eval.first_stages --data FOLDER --split test bm25 hybrid``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from .candidates import RETRIEVERS
from .data import Dataset, load_beir
from .measures import mean, ndcg, recall

DEPTH = 100


def measure_first_stage(dataset: Dataset, spec: str, **options: Any) -> Iterator[str]:
    """Lines of a Markdown table: quality and seconds; of a hybrid, first those of its parts.

    A part's seconds to index are the hybrid's, which indexes once.
    """
    retriever = import_module(RETRIEVERS).make_retriever(spec, **options)
    started = time.perf_counter()
    retriever.index(dataset.corpus, progress=True)
    indexed = time.perf_counter() - started
    described = " ".join([spec, *(f"{key}={value}" for key, value in options.items())])
    parts = [(f"part of it: {type(part).__name__}", part) for part in _parts(retriever)]
    for label, searched in [*parts, (described, retriever)]:
        started = time.perf_counter()
        run = searched.search(dataset.queries, DEPTH, progress=True)
        seconds = time.perf_counter() - started
        yield (
            f"| {dataset.name} | {label} | {len(dataset.queries)} "
            f"| {mean(ndcg(dataset.qrels, run)):.4f} | {mean(recall(dataset.qrels, run)):.4f} "
            f"| {indexed:.1f} | {seconds:.1f} |"
        )


def _parts(retriever: Any) -> tuple[Any, ...]:
    return getattr(retriever, "parts", ())


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints a Markdown table on stdout, or one line why not and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m core_rerank.eval.first_stages", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True, help="BEIR folder")
    parser.add_argument("--split", default="test", help="name of the file in qrels/")
    parser.add_argument("--language", default="auto", help="of BM25's stemmer and stop words")
    parser.add_argument("retrievers", nargs="+", help="bm25, dense, hybrid or run:FILE")
    arguments = parser.parse_args(argv)
    from core_rerank.errors import CoreRerankError

    language = {} if arguments.language == "auto" else {"language": arguments.language}
    try:
        dataset = load_beir(arguments.data, arguments.split)
        print("| data | retriever | queries | nDCG@10 | recall@20 | index s | search s |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for spec in arguments.retrievers:
            options = language if spec in ("bm25", "hybrid") else {}
            for line in measure_first_stage(dataset, spec, **options):
                print(line, flush=True)
    except (CoreRerankError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
