"""Retrievers by name: made, loaded, or whichever of the two is needed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .base import Retriever
from .bm25 import BM25Retriever
from .corpus import Corpus
from .dense import DenseRetriever
from .hybrid import HybridRetriever
from .index_folder import is_index, read_manifest
from .run_file import RunFileRetriever
from .vectors import FaissSettings

KINDS: dict[str, Any] = {
    "bm25": BM25Retriever,
    "dense": DenseRetriever,
    "hybrid": HybridRetriever,
    "run": RunFileRetriever,
}
SPECS = "bm25, dense, hybrid or run:FILE"


def make_retriever(spec: str, **options: Any) -> Retriever:
    """A retriever without an index, by its name: ``bm25``, ``dense``, ``hybrid``, ``run:FILE``.

    Options, all with defaults:

    - bm25: ``k1``, ``b``, ``language``;
    - dense: ``model``, ``revision``, ``device``, ``batch_size``, and the fields of
      ``FaissSettings``, whose ``kind`` is ``vector_index`` here;
    - hybrid: those of bm25 and dense, and ``rrf_k``, ``weights`` (of bm25, of dense), ``pool``.

    Raises:
        ValueError: no such name, or an option's value is out of range.
        TypeError: an option that this retriever does not have.
    """
    if spec.startswith("run:"):
        _refuse_unknown(spec, options, set())
        return RunFileRetriever(spec.removeprefix("run:"))
    makers: Mapping[str, tuple[Callable[..., Retriever], set[str]]] = {
        "bm25": (BM25Retriever, _BM25_OPTIONS),
        "dense": (_make_dense, _DENSE_OPTIONS),
        "hybrid": (_make_hybrid, _BM25_OPTIONS | _DENSE_OPTIONS | _HYBRID_OPTIONS),
    }
    if spec not in makers:
        raise ValueError(f"no retriever {spec!r}: expected {SPECS}.")
    make, known = makers[spec]
    _refuse_unknown(spec, options, known)
    return make(**options)


def load_retriever(folder: str | Path, corpus: Corpus | None = None, **options: Any) -> Retriever:
    """The retriever that ``save`` wrote to ``folder``, of whatever kind.

    ``options`` go to the kind's own ``load``: dense and hybrid have ``model``, ``device`` and
    ``batch_size``.

    Raises:
        IndexFolderError: the folder is damaged, or the index is of another corpus than ``corpus``.
    """
    return KINDS[read_manifest(folder).kind].load(folder, corpus, **options)


def index_or_load(
    spec: str | Retriever,
    corpus: Corpus,
    folder: str | Path,
    *,
    progress: bool = False,
    **options: Any,
) -> Retriever:
    """A retriever with the index in ``folder``; builds it and saves it there first, if new.

    ``spec`` and ``options`` are ``make_retriever``'s; or ``spec`` is a retriever, and takes none.

    Raises:
        IndexFolderError: the index there is damaged, or of another corpus, settings or model.
        TypeError: an option that this retriever does not have.
    """
    if options and not isinstance(spec, str):
        raise TypeError(
            f"a {type(spec).__name__} that is made already takes no {', '.join(options)}: set it "
            "where the retriever is made."
        )
    retriever = make_retriever(spec, **options) if isinstance(spec, str) else spec
    if is_index(folder):
        retriever.restore(folder, corpus)
        return retriever
    retriever.index(corpus, progress=progress)
    retriever.save(folder)
    return retriever


def kind_of(retriever: Retriever) -> str:
    """The name of a retriever's class in ``KINDS``; TypeError for a class that is not there."""
    for kind, made in KINDS.items():
        if type(retriever) is made:
            return kind
    raise TypeError(
        f"{type(retriever).__name__} cannot be saved as a part: expected one of "
        f"{', '.join(made.__name__ for made in KINDS.values())}."
    )


def _parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


_VECTOR_SIZES = {field.name for field in dataclasses.fields(FaissSettings)} - {"kind"}
_BM25_OPTIONS = _parameters(BM25Retriever)
_DENSE_OPTIONS = _parameters(DenseRetriever) - {"faiss"} | {"vector_index"} | _VECTOR_SIZES
_HYBRID_OPTIONS = {"rrf_k", "weights", "pool"}


def _make_dense(vector_index: Any = "flat", **options: Any) -> DenseRetriever:
    sizes = {name: options.pop(name) for name in _VECTOR_SIZES & set(options)}
    return DenseRetriever(**options, faiss=FaissSettings(vector_index, **sizes))


def _make_hybrid(rrf_k: float = 60.0, **options: Any) -> HybridRetriever:
    bm25 = {name: options.pop(name) for name in _BM25_OPTIONS & set(options)}
    dense = {name: options.pop(name) for name in _DENSE_OPTIONS & set(options)}
    return HybridRetriever([BM25Retriever(**bm25), _make_dense(**dense)], k=rrf_k, **options)


def _refuse_unknown(spec: str, options: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(
            f"the retriever {spec!r} has no option {unknown[0]!r}; it has "
            f"{', '.join(sorted(known)) or 'none'}."
        )
