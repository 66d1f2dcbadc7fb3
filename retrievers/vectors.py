"""A faiss index of unit vectors under the inner product: exact by default, IVF or HNSW."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from core_rerank.errors import MissingDependencyError
from core_rerank.inputs import check_count

VectorIndex = Literal["flat", "ivf", "hnsw"]
# What faiss asks for, a list, before it warns that k-means has too few points.
_POINTS_A_LIST = 39
# As many points a list as faiss's k-means uses at most.
_SAMPLE_A_LIST = 256
_SEED = 20240607


@dataclass(frozen=True, slots=True)
class FaissSettings:
    """Which index, and its sizes; the sizes of the other kinds are not used.

    Attributes:
        kind: ``"flat"`` compares with every vector (exact), ``"ivf"`` with those of the nearest
            lists, ``"hnsw"`` walks a graph.
        ivf_lists: how many lists; None takes 4 sqrt(n), but at least 39 vectors a list.
        ivf_probes: lists looked into for a query.
        hnsw_links: neighbours of a vector in the graph.
        hnsw_build: candidates kept while the graph is built (efConstruction).
        hnsw_search: candidates kept while it is searched (efSearch); at least the depth is taken.
    """

    kind: VectorIndex = "flat"
    ivf_lists: int | None = None
    ivf_probes: int = 16
    hnsw_links: int = 32
    hnsw_build: int = 200
    hnsw_search: int = 128

    def __post_init__(self) -> None:
        if self.kind not in ("flat", "ivf", "hnsw"):
            raise ValueError(f"no vector index {self.kind!r}: expected flat, ivf or hnsw.")
        for name in ("ivf_lists", "ivf_probes", "hnsw_links", "hnsw_build", "hnsw_search"):
            value = getattr(self, name)
            if name != "ivf_lists" or value is not None:
                object.__setattr__(self, name, check_count(name, value))
        if self.hnsw_links < 2:
            raise ValueError("hnsw_links must be at least 2: a graph of single links is no graph.")


def build(batches: Iterable[Any], dimension: int, settings: FaissSettings) -> Any:
    """A faiss index of the rows of ``batches`` (each float32 [rows, dimension], unit length).

    flat and hnsw take in batch after batch; ivf first holds all vectors, to learn its lists.
    """
    faiss = import_faiss()
    metric = faiss.METRIC_INNER_PRODUCT
    if settings.kind == "ivf":
        return _build_ivf(faiss, batches, dimension, settings)
    if settings.kind == "hnsw":
        index = faiss.IndexHNSWFlat(dimension, settings.hnsw_links, metric)
        index.hnsw.efConstruction = settings.hnsw_build
    else:
        index = faiss.IndexFlatIP(dimension)
    for batch in batches:
        index.add(batch)
    return index


def search(
    index: Any, vectors: Any, depth: int, settings: FaissSettings
) -> list[list[tuple[int, float]]]:
    """For each query vector, (row, inner product) of at most ``depth`` rows, best first.

    Equal products keep the order of the rows.
    """
    faiss = import_faiss()
    depth = min(depth, index.ntotal)
    options: dict[str, Any] = {}
    if settings.kind == "ivf":
        options["params"] = faiss.SearchParametersIVF(nprobe=settings.ivf_probes)
    elif settings.kind == "hnsw":
        options["params"] = faiss.SearchParametersHNSW(efSearch=max(settings.hnsw_search, depth))
    products, rows = index.search(vectors, depth, **options)
    return [
        sorted(
            ((int(row), float(product)) for row, product in zip(*pair, strict=True) if row >= 0),
            key=lambda found: (-found[1], found[0]),
        )
        for pair in zip(rows, products, strict=True)
    ]


def import_faiss() -> Any:
    """The faiss module; says how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise MissingDependencyError(
            f"dense retrieval needs faiss ({error}). "
            "To install it: pip install 'core-rerank[dense]'."
        ) from None
    return faiss


def _build_ivf(faiss: Any, batches: Iterable[Any], dimension: int, settings: FaissSettings) -> Any:
    import numpy as np

    chunks = list(batches)
    if not chunks:
        return faiss.IndexFlatIP(dimension)
    vectors = np.concatenate(chunks)
    lists = settings.ivf_lists
    if lists is None:
        lists = max(1, min(int(4 * math.sqrt(len(vectors))), len(vectors) // _POINTS_A_LIST))
    if lists > len(vectors):
        raise ValueError(
            f"ivf_lists is {lists}, but there are {len(vectors)} documents: give at most as many, "
            "or leave it out."
        )
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(dimension), dimension, lists, faiss.METRIC_INNER_PRODUCT
    )
    points = min(len(vectors), lists * _SAMPLE_A_LIST)
    sample = np.random.default_rng(_SEED).choice(len(vectors), points, replace=False)
    index.cp.min_points_per_centroid = 1  # few points are the caller's choice, not a fault
    index.train(vectors[np.sort(sample)])
    index.add(vectors)
    return index
