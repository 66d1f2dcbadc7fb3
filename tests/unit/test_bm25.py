"""BM25Retriever: hand-computed scores, ties, text handling and what it refuses."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from core_rerank.beir import CorpusFile
from core_rerank.eval.data import load_beir
from core_rerank.eval.measures import mean, ndcg
from core_rerank.retrievers import BM25Retriever
from core_rerank.types import Document

SCIFACT = Path(__file__).parents[3] / "shared" / "data" / "scifact"

CORPUS = {
    "a": Document("Volcanoes erupt ash and lava", "a"),
    "b": Document("bread", "b", "Sourdough baking"),
    "c": Document("Lava lava lava everywhere", "c"),
    "d": Document("", "d"),
}


@pytest.fixture
def bm25() -> BM25Retriever:
    retriever = BM25Retriever()
    retriever.index(CORPUS)
    return retriever


def test_scores_are_lucenes_bm25(bm25: BM25Retriever) -> None:
    # Lengths without stop words 4, 3, 4, 0: mean 2.75. "lava" is in 2 of 4 documents.
    idf = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    norm = 0.9 * (1 - 0.4 + 0.4 * 4 / 2.75)
    run = bm25.search({"q": "LAVA!"}, 10)
    assert list(run["q"]) == ["c", "a"]
    assert run["q"]["a"] == pytest.approx(idf * 1 / (1 + norm), rel=1e-5)
    assert run["q"]["c"] == pytest.approx(idf * 3 / (3 + norm), rel=1e-5)


def test_title_is_searched_and_words_are_stemmed(bm25: BM25Retriever) -> None:
    run = bm25.search({"1": "bake", "2": "erupting volcano"}, 10)
    assert list(run["1"]) == ["b"]
    assert list(run["2"]) == ["a"]


def test_every_query_is_in_the_run_even_without_a_match(bm25: BM25Retriever) -> None:
    run = bm25.search({"none": "quantum", "stop": "the of and", "blank": " "}, 10)
    assert run == {"none": {}, "stop": {}, "blank": {}}
    assert bm25.search({}, 10) == {}


def test_equal_scores_keep_corpus_order_and_depth_cuts() -> None:
    corpus = {f"doc{i}": Document("same words here", f"doc{i}") for i in range(50)}
    retriever = BM25Retriever()
    retriever.index(corpus)
    run = retriever.search({"q": "words"}, 7)
    assert list(run["q"]) == [f"doc{i}" for i in range(7)]


def test_indexing_again_replaces_the_corpus(bm25: BM25Retriever) -> None:
    bm25.index({"z": Document("lava", "z")})
    assert list(bm25.search({"q": "lava"}, 10)["q"]) == ["z"]


def test_refusals(bm25: BM25Retriever) -> None:
    with pytest.raises(ValueError, match="depth must be a whole number from 1, not 0"):
        bm25.search({"q": "lava"}, 0)
    with pytest.raises(ValueError, match="corpus is empty"):
        bm25.index({})
    with pytest.raises(RuntimeError, match=r"before index\(corpus\)"):
        BM25Retriever().search({"q": "lava"}, 1)
    with pytest.raises(ValueError, match="k1=-1"):
        BM25Retriever(k1=-1)
    with pytest.raises(ValueError, match=r"b=1\.5"):
        BM25Retriever(b=1.5)


def test_a_corpus_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the 1 documents of the corpus has a word"):
        BM25Retriever().index({"a": Document("...", "a")})
    with pytest.raises(RuntimeError, match=r"BM25Retriever\.save was called before"):
        BM25Retriever().save("nowhere")


def test_ties_at_the_last_place_go_to_those_that_come_first() -> None:
    texts = ["lava", "lava lava", "lava", "ash", "lava", "lava lava"]
    retriever = BM25Retriever(b=0)
    retriever.index({str(number): Document(text) for number, text in enumerate(texts)})
    orders = [list(retriever.search({"q": "lava"}, depth)["q"]) for depth in range(1, 7)]
    assert orders[-1] == ["1", "5", "0", "2", "4"]
    assert all(order == orders[-1][: len(order)] for order in orders)
    assert [len(order) for order in orders] == [1, 2, 3, 4, 5, 5]


def test_jax_is_not_started(tmp_path: Path) -> None:
    """With a GPU it would take three quarters of the memory, and vLLM would not start."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("print('jax started')\n")
    (tmp_path / "jax" / "lax.py").write_text("top_k = print\n")
    code = (
        "from core_rerank.retrievers import BM25Retriever; BM25Retriever(); import bm25s.selection;"
        "print(bm25s.selection.JAX_IS_AVAILABLE); import jax"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:2] == ["False", "jax started"]


@pytest.mark.slow
@pytest.mark.skipif(not SCIFACT.is_dir(), reason="needs the SciFact collection")
def test_scifact_is_as_good_as_published() -> None:
    # Anserini's BM25 at k1 0.9 and b 0.4: title and text in one field .6789, in two .6647.
    data = load_beir(SCIFACT, "test")
    retriever = BM25Retriever()
    retriever.index(CorpusFile(SCIFACT))
    score = mean(ndcg(data.qrels, retriever.search(data.queries, 100)))
    assert 0.6647 - 0.01 <= score <= 0.6789 + 0.01
