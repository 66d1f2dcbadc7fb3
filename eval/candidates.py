"""A first stage's candidates for every query, with their texts; kept on disk for the next run."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from core_rerank.errors import DataError
from core_rerank.inputs import check_count
from core_rerank.types import Document

from .data import Dataset
from .files import differences, digest, make_folder, to_json, write_whole

RETRIEVERS = "core_rerank.retrievers"
CORPUS_PASS = "core_rerank.retrievers.corpus"
FILE = "candidates.json"
FORMAT = 1
OWN_ID_COLLECTIONS = ("arguana", "quora")
"""Collections whose queries are documents too: BEIR takes a query's own document away there."""
Run = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Candidates:
    """What a first stage found.

    Attributes:
        run: query id -> document id -> score, best first; every judged query is in it.
        documents: the candidates' texts by id.
        depth: how many were asked for.
        retriever: the first stage's name.
        settings: what else decides the run, as JSON.
        corpus: number of documents searched, and a hash of them.
        seconds: what searching took; indexing is not in it.
    """

    run: Run
    documents: dict[str, Document]
    depth: int
    retriever: str = "given"
    settings: dict[str, Any] = field(default_factory=dict)
    corpus: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @cached_property
    def digest(self) -> str:
        """A hash of the candidates: ids, order, titles and texts."""
        texts = {name: [d.title, d.text] for name, d in self.documents.items()}
        return digest([[[q, list(scores)] for q, scores in self.run.items()], texts])


def find_candidates(
    dataset: Dataset,
    retriever: str = "bm25",
    depth: int = 40,
    *,
    ignore_identical_ids: bool | None = None,
    index: Path | None = None,
    keep: Path | None = None,
    progress: bool = False,
) -> Candidates:
    """Search the corpus for every query of ``dataset``.

    Args:
        dataset: may have its corpus on disk, which is then streamed; texts of candidates alone
            come into memory.
        retriever: ``bm25``, ``dense``, ``hybrid`` or ``run:FILE`` (see ``make_retriever``).
        depth: candidates a query; fewer where fewer match.
        ignore_identical_ids: take away the document whose id is the query's. None: only on
            ArguAna and Quora.
        index: a folder for the index, used if it is there, else written; see ``index_or_load``.
        keep: a folder to keep the run in (``candidates.json``): the next call with the same
            arguments reads it instead of searching.
        progress: show bars on stderr.

    Raises:
        DataError: what ``keep`` holds is of other arguments (names them) or damaged; a candidate
            is not in the corpus.
        ValueError, MissingDependencyError: as the retriever's own.
    """
    if ignore_identical_ids is None:
        ignore_identical_ids = removes_own_ids(dataset)
    depth = check_count("depth", depth)
    searcher = import_module(RETRIEVERS).make_retriever(retriever)
    settings = {
        "retriever": _name(retriever),
        "retriever_settings": searcher.settings,
        "depth": depth,
        "identical_ids_removed": ignore_identical_ids,
        "queries": digest(dataset.queries),
    }
    if keep is not None:
        make_folder(keep)
    kept = None if keep is None else _read(keep / FILE, json.loads(to_json(settings)))
    if kept is None:
        wanted = depth + ignore_identical_ids
        found, seconds = _search(searcher, dataset, wanted, index, progress=progress)
        run = {q: _cut(scores, depth, q, ignore_identical_ids) for q, scores in found.items()}
    else:
        run, seconds = kept["run"], kept["seconds"]
    documents, corpus = _texts(dataset, run, progress=progress)
    if kept is not None and kept["corpus"] != corpus:
        raise DataError(
            f"{keep} was made from another corpus: {'; '.join(differences(kept['corpus'], corpus))}"
            ". Give the corpus it was made from, or another folder."
        )
    if kept is None and keep is not None:
        content = {"format": FORMAT, "settings": settings, "corpus": corpus, "seconds": seconds}
        write_whole(keep / FILE, json.dumps({**content, "run": run}, ensure_ascii=False) + "\n")
    return Candidates(run, documents, depth, _name(retriever), settings, corpus, seconds)


def removes_own_ids(dataset: Dataset) -> bool:
    """Whether a query's own document is taken away by default, judged by the collection's name."""
    return dataset.name.lower().startswith(OWN_ID_COLLECTIONS)


def _search(
    searcher: Any, dataset: Dataset, depth: int, index: Path | None, *, progress: bool
) -> tuple[Run, float]:
    """What the retriever finds, and the seconds that searching took; indexes first."""
    if index is None:
        searcher.index(dataset.documents, progress=progress)
    else:
        indexed = import_module(RETRIEVERS).index_or_load
        searcher = indexed(searcher, dataset.documents, index, progress=progress)
    started = time.perf_counter()
    run = searcher.search(dataset.queries, depth, progress=progress)
    return run, time.perf_counter() - started


def _name(retriever: str) -> str:
    """A run file without its folders: what it holds is in its settings."""
    kind, colon, path = retriever.partition(":")
    return f"{kind}{colon}{Path(path).name}" if colon else kind


def _cut(scores: dict[str, float], depth: int, query_id: str, remove: bool) -> dict[str, float]:
    kept = [doc_id for doc_id in scores if not (remove and doc_id == query_id)]
    return {doc_id: scores[doc_id] for doc_id in kept[:depth]}


def _read(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What is kept there, if anything; its corpus is not checked yet."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        there, run = content["settings"], content["run"]
        if content["format"] != FORMAT or not isinstance(run, dict):
            raise ValueError("another format")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged, or was written by another release of core-rerank ({error}): "
            "delete it to search again."
        ) from None
    if told := differences(there, settings):
        raise DataError(
            f"{path.parent} was made with other settings: {'; '.join(told)}. Give the settings it "
            "was made with, or another folder."
        )
    return content


def _texts(
    dataset: Dataset, run: Run, *, progress: bool
) -> tuple[dict[str, Document], dict[str, Any]]:
    """The candidates' documents, and what the corpus is, in one pass over it."""
    wanted = {doc_id for scores in run.values() for doc_id in scores}
    reading = import_module(CORPUS_PASS).CorpusPass(
        dataset.documents, "reading the candidates", progress=progress
    )
    pairs: Iterable[tuple[str, Document]] = reading
    found = {doc_id: document for doc_id, document in pairs if doc_id in wanted}
    absent = sorted(wanted - found.keys())
    if absent:
        raise DataError(
            f"candidate {absent[0]!r} is not in the corpus of {dataset.name} ({len(absent)} such): "
            "is this a run over another corpus?"
        )
    mark = reading.fingerprint()
    return found, {"documents": mark.documents, "sha256": mark.sha256}
