"""Reciprocal rank fusion of several first stages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from core_rerank.inputs import check_count

from .base import Retriever, Run, versions
from .corpus import Corpus, Fingerprint, fingerprint
from .index_folder import Manifest, read_index, read_manifest, write_index


def reciprocal_rank_fusion(
    runs: Sequence[Mapping[str, Mapping[str, float]]],
    depth: int,
    *,
    k: float = 60.0,
    weights: Sequence[float] | None = None,
) -> Run:
    """One run out of several: a document's score is the sum of weight / (k + rank), rank from 1.

    A run of weight 0 adds no documents.

    Cormack, Clarke and Buettcher, SIGIR 2009; there every weight is 1 and k is 60. Only the order
    of each run counts, as it stands. Equal sums keep the order in which the runs, one after the
    other, name the documents. A query that one run lacks is fused from the others.

    Raises:
        ValueError: no runs; k is negative; weights are as many as the runs, finite and >= 0, but
            not these.
    """
    depth = check_count("depth", depth)
    factors = _check_fusion(len(runs), k, weights)
    query_ids = dict.fromkeys(query_id for run in runs for query_id in run)
    fused: Run = {}
    for query_id in query_ids:
        sums: dict[str, float] = {}
        for run, weight in zip(runs, factors, strict=True):
            if weight == 0:
                continue
            for rank, doc_id in enumerate(run.get(query_id, ()), start=1):
                sums[doc_id] = sums.get(doc_id, 0.0) + weight / (k + rank)
        order = sorted(sums, key=lambda doc_id: -sums[doc_id])
        fused[query_id] = {doc_id: sums[doc_id] for doc_id in order[:depth]}
    return fused


class HybridRetriever:
    """Searches with several retrievers and fuses their rankings (``reciprocal_rank_fusion``)."""

    def __init__(
        self,
        retrievers: Sequence[Retriever],
        *,
        k: float = 60.0,
        weights: Sequence[float] | None = None,
        pool: int = 100,
    ) -> None:
        """``pool`` documents of each retriever are fused, or the search's depth if that is more."""
        pool = check_count("pool", pool)
        self._retrievers = list(retrievers)
        self._weights = _check_fusion(len(self._retrievers), k, weights)
        self._k = k
        self._pool = pool
        self._corpus: Fingerprint | None = None

    @property
    def parts(self) -> tuple[Retriever, ...]:
        """The retrievers that are fused."""
        return tuple(self._retrievers)

    @property
    def settings(self) -> dict[str, Any]:
        """``k``, ``weights``, ``pool``, and the parts' kinds and settings."""
        parts = [{"kind": _kind(part), "settings": part.settings} for part in self._retrievers]
        return {"k": self._k, "weights": self._weights, "pool": self._pool, "parts": parts}

    def index(self, corpus: Corpus, *, progress: bool = False) -> None:
        """Index the corpus with each retriever; it is read through once for each.

        Raises:
            TypeError: the corpus is an iterator, which can be read only once.
            DataError, ValueError: as the retrievers' own ``index``.
        """
        if isinstance(corpus, Iterator):
            raise TypeError(
                "HybridRetriever reads the corpus more than once: give a CorpusFile, a mapping or "
                "a list, not an iterator."
            )
        checked = fingerprint(corpus, progress=progress)
        for retriever in self._retrievers:
            retriever.index(corpus, progress=progress)
        self._corpus = checked

    def search(self, queries: Mapping[str, str], depth: int, *, progress: bool = False) -> Run:
        """At most ``depth`` documents for each query, best first; every query is in the run.

        A score is a sum of weight / (k + rank).
        """
        depth = check_count("depth", depth)
        wanted = max(depth, self._pool)
        runs = [part.search(queries, wanted, progress=progress) for part in self._retrievers]
        return reciprocal_rank_fusion(runs, depth, k=self._k, weights=self._weights)

    def save(self, folder: str | Path) -> None:
        """Write all indexes into one folder, whole or not at all; replaces one that is there.

        Raises:
            IndexFolderError: something that is not an index is there.
            RuntimeError: nothing was indexed.
        """
        if self._corpus is None:
            raise RuntimeError("HybridRetriever.save was called before index(corpus).")
        write_index(
            folder, Manifest("hybrid", self.settings, self._corpus, versions()), self._write
        )

    def restore(self, folder: str | Path, corpus: Corpus | None = None) -> None:
        """Take over indexes that ``save`` wrote, in place of ``index``.

        Raises:
            IndexFolderError: one is damaged, of other settings, of another model, or of another
                corpus than ``corpus``.
        """
        manifest = read_index(folder, "hybrid", self.settings, corpus)
        for number, part in enumerate(self._retrievers):
            part.restore(Path(folder) / _part_name(number, _kind(part)))
        self._corpus = manifest.corpus

    @classmethod
    def load(cls, folder: str | Path, corpus: Corpus | None = None, **dense: Any) -> Self:
        """An index that ``save`` wrote, with its settings and its parts' settings and models.

        ``dense`` goes to ``DenseRetriever.load`` (``model``, ``device``, ``batch_size``).

        Raises:
            IndexFolderError: see ``restore``.
        """
        from .factory import load_retriever

        settings = read_manifest(folder, "hybrid").settings
        parts = [
            load_retriever(
                Path(folder) / _part_name(number, part["kind"]),
                **(dense if part["kind"] in ("dense", "hybrid") else {}),
            )
            for number, part in enumerate(settings["parts"])
        ]
        retriever = cls(parts, k=settings["k"], weights=settings["weights"], pool=settings["pool"])
        retriever._corpus = read_index(folder, "hybrid", retriever.settings, corpus).corpus
        return retriever

    def _write(self, folder: Path) -> None:
        for number, part in enumerate(self._retrievers):
            part.save(folder / _part_name(number, _kind(part)))


def _kind(retriever: Retriever) -> str:
    from .factory import kind_of

    return kind_of(retriever)


def _part_name(number: int, kind: str) -> str:
    return f"{number}-{kind}"


def _check_fusion(runs: int, k: float, weights: Sequence[float] | None) -> list[float]:
    if not runs:
        raise ValueError("fusion needs at least one ranking.")
    if not 0 <= k < math.inf:
        raise ValueError(f"k must be a finite number of at least 0, not {k!r}.")
    if weights is None:
        return [1.0] * runs
    if len(weights) != runs:
        raise ValueError(f"there are {runs} rankings to fuse, but {len(weights)} weights.")
    if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
        raise ValueError(f"weights must be finite, >= 0 and not all 0, not {list(weights)!r}.")
    return [float(weight) for weight in weights]
