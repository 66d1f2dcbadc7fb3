"""Hard negatives by BM25, for head detection on a BEIR folder that has only judgements."""

from __future__ import annotations

import importlib
from pathlib import Path

from core_rerank.labelled_queries import LabelledQuery, mine_labelled_queries

from .terminal import err, say


def mine_hard_negatives(
    folder: Path, split: str, limit: int | None, negatives: int
) -> list[LabelledQuery]:
    """The first ``limit`` queries of qrels/SPLIT.tsv with up to ``negatives`` of BM25's best.

    Raises:
        DataError: as ``load_beir`` and ``mine_labelled_queries`` do.
        MissingDependencyError: BM25's packages are not installed.
    """
    # By name: the library may not import what stands on it.
    load_beir = importlib.import_module("core_rerank.eval.data").load_beir
    retriever = importlib.import_module("core_rerank.retrievers").BM25Retriever()
    dataset = load_beir(folder, split).first(limit)
    say(f"Looking for hard negatives among {len(dataset.corpus)} documents by BM25")
    retriever.index(dataset.corpus, progress=err().is_terminal)
    most_judged = max(len(judged) for judged in dataset.qrels.values())
    depth = negatives + most_judged
    run = retriever.search(dataset.queries, depth, progress=err().is_terminal)
    return mine_labelled_queries(dataset.corpus, dataset.queries, dataset.qrels, run, negatives)
