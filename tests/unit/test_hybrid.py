"""Reciprocal rank fusion by hand, HybridRetriever, and retrievers made and loaded by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_rerank.errors import IndexFolderError
from core_rerank.retrievers import (
    BM25Retriever,
    DenseRetriever,
    FaissSettings,
    HybridRetriever,
    RunFileRetriever,
    index_or_load,
    load_retriever,
    make_retriever,
    reciprocal_rank_fusion,
)
from core_rerank.types import Document

FIRST = {"q": {"a": 9.0, "b": 8.0, "c": 7.0}}
SECOND = {"q": {"c": 0.3, "d": 0.2}, "only here": {"e": 0.1}}
CORPUS = {
    "1": Document("lava flows", "1"),
    "2": Document("ash falls", "2"),
    "3": Document("bread", "3"),
}


class LengthEncoder:
    """A vector of a text's length and its number of words."""

    identity: Mapping[str, str | None] = {"model": "length", "revision": None, "sha256": "1"}
    dimension = 2

    def encode_documents(self, texts: Sequence[str]) -> Any:
        return np.array([[len(text), text.count(" ") + 1] for text in texts])

    encode_queries = encode_documents


def test_fusion_by_hand() -> None:
    fused = reciprocal_rank_fusion([FIRST, SECOND], 10)
    assert fused["q"] == pytest.approx(
        {"c": 1 / 63 + 1 / 61, "a": 1 / 61, "b": 1 / 62, "d": 1 / 62}
    )
    # b and d have equal sums: the first run comes first.
    assert list(fused["q"]) == ["c", "a", "b", "d"]
    assert fused["only here"] == {"e": pytest.approx(1 / 61)}
    assert list(reciprocal_rank_fusion([FIRST, SECOND], 2)["q"]) == ["c", "a"]


def test_k_and_weights_are_in_the_sum() -> None:
    fused = reciprocal_rank_fusion([FIRST, SECOND], 10, k=0, weights=[1, 3])
    assert fused["q"] == pytest.approx({"c": 1 / 3 + 3, "d": 3 / 2, "a": 1, "b": 1 / 2})
    alone = reciprocal_rank_fusion([FIRST, SECOND], 10, weights=[1, 0])
    assert list(alone["q"]) == ["a", "b", "c"]
    assert alone["only here"] == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runs": []}, "at least one ranking"),
        ({"k": -1}, "k must be a finite number of at least 0, not -1"),
        ({"weights": [1]}, "there are 2 rankings to fuse, but 1 weights"),
        ({"weights": [0, 0]}, "finite, >= 0 and not all 0"),
        ({"weights": [1, -1]}, "finite, >= 0 and not all 0"),
        ({"depth": 0}, "depth must be"),
    ],
)
def test_fusions_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reciprocal_rank_fusion(**{"runs": [FIRST, SECOND], "depth": 3, **options})


def hybrid(**options: Any) -> HybridRetriever:
    return HybridRetriever([BM25Retriever(), DenseRetriever(LengthEncoder())], **options)


def test_a_hybrid_is_the_fusion_of_its_parts() -> None:
    retriever = hybrid(k=10, weights=[2, 1])
    retriever.index(CORPUS)
    queries = {"q": "lava", "none": "quantum"}
    parts = [BM25Retriever(), DenseRetriever(LengthEncoder())]
    for part in parts:
        part.index(CORPUS)
    runs = [part.search(queries, 100) for part in parts]
    expected = reciprocal_rank_fusion(runs, 2, k=10, weights=[2, 1])
    assert retriever.search(queries, 2) == expected
    assert next(iter(expected["q"])) == "1"


def test_the_pool_is_deeper_than_the_depth() -> None:
    narrow, wide = hybrid(pool=1), hybrid(pool=3)
    for retriever in (narrow, wide):
        retriever.index(CORPUS)
    assert len(narrow.search({"q": "lava"}, 1)["q"]) == 1
    # At pool 1, only each part's first is fused.
    assert wide.search({"q": "lava"}, 1)["q"]["1"] > narrow.search({"q": "lava"}, 1)["q"]["1"]


def test_a_hybrid_is_saved_and_restored_with_its_parts(tmp_path: Path) -> None:
    retriever = hybrid(weights=[2, 1])
    with pytest.raises(RuntimeError, match="before index"):
        retriever.save(tmp_path / "index")
    retriever.index(CORPUS)
    retriever.save(tmp_path / "index")
    expected = retriever.search({"q": "ash"}, 3)
    loaded = load_retriever(tmp_path / "index", CORPUS, model=LengthEncoder())
    assert loaded.settings == retriever.settings
    assert loaded.search({"q": "ash"}, 3) == expected
    restored = hybrid(weights=[2, 1])
    restored.restore(tmp_path / "index", CORPUS)
    assert restored.search({"q": "ash"}, 3) == expected
    with pytest.raises(IndexFolderError, match=r"weights=\[2\.0, 1\.0\]"):
        hybrid().restore(tmp_path / "index")
    (tmp_path / "index" / "0-bm25" / "doc_ids.json").write_text("[]")
    with pytest.raises(IndexFolderError, match="not as it was written"):
        hybrid(weights=[2, 1]).restore(tmp_path / "index")


def test_a_corpus_that_can_be_read_only_once_is_refused() -> None:
    with pytest.raises(TypeError, match="more than once: give a CorpusFile"):
        hybrid().index(iter([Document("x", "1")]))


def test_retrievers_are_made_by_name(tmp_path: Path) -> None:
    bm25 = make_retriever("bm25", k1=1.2, language="de")
    assert bm25.settings == {"k1": 1.2, "b": 0.4, "language": "de"}
    dense = make_retriever("dense", model=LengthEncoder(), vector_index="hnsw", hnsw_links=8)
    assert dense.settings["kind"] == "hnsw"
    assert dense.settings["hnsw_links"] == 8
    both = make_retriever("hybrid", model=LengthEncoder(), b=0.5, rrf_k=10, weights=(1, 2), pool=7)
    assert both.settings["k"] == 10
    assert both.settings["parts"][0]["settings"]["b"] == 0.5
    assert both.settings["pool"] == 7
    (tmp_path / "run.trec").write_text("q Q0 1 1 2.5 t\n")
    assert isinstance(make_retriever(f"run:{tmp_path}/run.trec"), RunFileRetriever)


def test_unknown_names_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="no retriever 'tfidf': expected bm25, dense, hybrid or"):
        make_retriever("tfidf")
    with pytest.raises(TypeError, match="'bm25' has no option 'model'; it has b, k1, language"):
        make_retriever("bm25", model="x")
    with pytest.raises(TypeError, match="'run:x' has no option 'k1'; it has none"):
        make_retriever("run:x", k1=1)
    with pytest.raises(TypeError, match="'hybrid' has no option 'faiss'"):
        make_retriever("hybrid", faiss=FaissSettings())


def test_index_or_load_builds_once_and_then_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "index"
    first = index_or_load("bm25", CORPUS, folder)
    monkeypatch.setattr(BM25Retriever, "index", lambda *_, **__: pytest.fail("built again"))
    second = index_or_load("bm25", CORPUS, folder)
    assert second.search({"q": "lava"}, 3) == first.search({"q": "lava"}, 3)
    with pytest.raises(IndexFolderError, match="another corpus"):
        index_or_load("bm25", {"1": CORPUS["1"]}, folder)
    with pytest.raises(IndexFolderError, match=r"k1=0\.9"):
        index_or_load("bm25", CORPUS, folder, k1=2)
    made = BM25Retriever()
    assert index_or_load(made, CORPUS, folder) is made
    assert made.search({"q": "lava"}, 3) == first.search({"q": "lava"}, 3)
    with pytest.raises(TypeError, match="a BM25Retriever that is made already takes no k1"):
        index_or_load(made, CORPUS, folder, k1=2)


def test_only_known_classes_can_be_parts_of_a_saved_index(tmp_path: Path) -> None:
    class Mine(BM25Retriever):
        """A retriever of one's own."""

    retriever = HybridRetriever([Mine()])
    retriever.index(CORPUS)
    assert list(retriever.search({"q": "lava"}, 3)["q"]) == ["1"]
    with pytest.raises(TypeError, match="Mine cannot be saved as a part"):
        retriever.save(tmp_path / "index")
