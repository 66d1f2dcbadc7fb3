"""Rerank a first stage's candidates and say what that did to nDCG@10.

Run as ``python -m core_rerank.eval.rerank_run --data FOLDER --split test --limit 50 --depth 20``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .data import Dataset, load_beir
from .measures import mean, ndcg, paired_bootstrap

if TYPE_CHECKING:
    from core_rerank.types import Ranking

BM25 = "core_rerank.retrievers:BM25Retriever"
Run = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """nDCG@10 of the first stage and after reranking, over ``queries`` queries.

    ``low`` and ``high`` bound the difference ``after - before`` (95 %, paired bootstrap);
    ``seconds`` is the time of the reranking alone.
    """

    data: str
    model: str
    strategy: str
    queries: int
    depth: int
    before: float
    after: float
    low: float
    high: float
    seconds: float


def first_stage(dataset: Dataset, depth: int) -> Run:
    """BM25's top ``depth`` documents of each query."""
    module, name = BM25.split(":")
    retriever = getattr(import_module(module), name)()
    retriever.index(dataset.corpus)
    return retriever.search(dataset.queries, depth)


def rerank_candidates(reranker: Any, dataset: Dataset, candidates: Run, batch: int) -> Run:
    """The candidates of each query in the order the reranker gives them; a bar on stderr.

    ``batch`` queries go to the engine at once. A query without candidates keeps none.
    """
    from tqdm import tqdm

    waiting = [query_id for query_id in dataset.queries if candidates[query_id]]
    run: Run = {query_id: {} for query_id in dataset.queries}
    with tqdm(total=len(waiting), desc="reranking", unit="query") as bar:
        for start in range(0, len(waiting), batch):
            part = waiting[start : start + batch]
            jobs = [
                (dataset.queries[query_id], [dataset.corpus[d] for d in candidates[query_id]])
                for query_id in part
            ]
            for query_id, ranking in zip(part, reranker.rerank_batch(jobs), strict=True):
                run[query_id] = _scores(ranking)
            bar.update(len(part))
    return run


def _scores(ranking: Ranking) -> dict[str, float]:
    return {str(document.doc_id): document.score for document in ranking}


def measure(dataset: Dataset, before: Run, after: Run) -> tuple[float, float, float, float]:
    """Mean nDCG@10 before and after, and the 95 % interval of the difference."""
    old, new = ndcg(dataset.qrels, before), ndcg(dataset.qrels, after)
    low, high = paired_bootstrap([new[query_id] - old[query_id] for query_id in dataset.qrels])
    return mean(old), mean(new), low, high


def write_trec(run: Run, path: Path, tag: str) -> None:
    """Write a run as TREC lines: query, Q0, document, rank, score, tag."""
    lines = [
        f"{query_id} Q0 {doc_id} {rank} {score:.8g} {tag}\n"
        for query_id, scores in run.items()
        for rank, (doc_id, score) in enumerate(scores.items(), start=1)
    ]
    path.write_text("".join(lines), encoding="utf-8")


def run(arguments: argparse.Namespace) -> Outcome:
    """Retrieve, rerank, measure."""
    from core_rerank.reranker import Reranker

    dataset = load_beir(arguments.data, arguments.split).first(arguments.limit)
    candidates = first_stage(dataset, arguments.depth)
    options: dict[str, Any] = {"backend": arguments.backend, "strategy": arguments.strategy}
    if arguments.window is not None:
        options["window"] = arguments.window
    if arguments.heads_config is not None:
        options["config"] = arguments.heads_config
    with Reranker(arguments.model, **options) as reranker:
        start = time.perf_counter()
        after = rerank_candidates(reranker, dataset, candidates, arguments.batch)
        seconds = time.perf_counter() - start
    if arguments.out is not None:
        write_trec(after, arguments.out, f"core-rerank-{arguments.strategy}")
    return Outcome(
        dataset.name,
        arguments.model,
        arguments.strategy,
        len(dataset.queries),
        arguments.depth,
        *measure(dataset, candidates, after),
        seconds,
    )


def _window(text: str) -> int | str:
    return text if text == "all" else int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core_rerank.eval.rerank_run", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True, help="BEIR folder")
    parser.add_argument("--split", default="test", help="name of the file in qrels/")
    parser.add_argument("--limit", type=int, help="only the first so many judged queries")
    parser.add_argument("--depth", type=int, default=20, help="candidates a query")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--strategy", default="core", choices=["core", "icr", "qr"])
    parser.add_argument("--window", type=_window, help="documents a prompt, or all")
    parser.add_argument("--heads-config", type=Path, help="head set in place of the model's own")
    parser.add_argument("--batch", type=int, default=8, help="queries sent to the engine at once")
    parser.add_argument("--out", type=Path, help="write the reranked run here, in TREC's form")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the engine's log")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; prints the outcome on stdout, or one line why not and returns 2."""
    arguments = _parser().parse_args(argv)
    from core_rerank.commands.terminal import quiet_engine
    from core_rerank.errors import CoreRerankError

    try:
        with quiet_engine(arguments.verbose):
            outcome = run(arguments)
    except CoreRerankError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps(asdict(outcome)))
        return 0
    print(
        f"{outcome.data}: {outcome.queries} queries, BM25 top {outcome.depth}, "
        f"{outcome.model} ({outcome.strategy})\n"
        f"nDCG@10 before {outcome.before:.4f}, after {outcome.after:.4f}, difference "
        f"{outcome.after - outcome.before:+.4f} (95 % {outcome.low:+.4f} to {outcome.high:+.4f})\n"
        f"reranking took {outcome.seconds:.1f} s, {outcome.seconds / outcome.queries:.2f} s a query"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
