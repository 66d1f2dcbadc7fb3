"""DenseRetriever on an encoder that counts letters: search, faiss kinds, saving, refusals."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_rerank.errors import IndexFolderError, MissingDependencyError, NotFiniteError
from core_rerank.retrievers import DenseRetriever, FaissSettings
from core_rerank.types import Document

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class LetterEncoder:
    """A vector counts letters; ``name`` and ``salt`` tell encoders apart."""

    dimension = len(LETTERS)

    def __init__(self, name: str = "letters", salt: str = "0") -> None:
        self.identity = {"model": name, "revision": None, "sha256": salt}
        self.batches: list[int] = []

    def encode_documents(self, texts: Sequence[str]) -> Any:
        self.batches.append(len(texts))
        return np.array([[text.count(letter) for letter in LETTERS] for text in texts])

    encode_queries = encode_documents


CORPUS = {
    "x": Document("aab", "x"),
    "y": Document("ab", "y", "b"),
    "blank": Document(" ", "blank"),
    "z": Document("zzz", "z"),
    "twin": Document("bba", "twin"),
}


def made(corpus: Any = CORPUS, **options: Any) -> DenseRetriever:
    retriever = DenseRetriever(LetterEncoder(), **options)
    retriever.index(corpus)
    return retriever


def random_corpus(size: int) -> dict[str, Document]:
    words = np.random.default_rng(1).choice(list(LETTERS), (size, 12))
    return {f"d{number}": Document("".join(row)) for number, row in enumerate(words)}


def test_scores_are_cosines_and_equal_ones_keep_corpus_order() -> None:
    run = made().search({"q": "abb", "other": "zq"}, 10)
    # "b ab" and "bba" count the same letters.
    assert list(run["q"]) == ["y", "twin", "x", "z"]
    assert run["q"]["y"] == run["q"]["twin"] == pytest.approx(1.0)
    assert run["q"]["x"] == pytest.approx(4 / 5)
    assert run["other"]["z"] == pytest.approx(1 / 2**0.5)


def test_blank_documents_and_queries_are_left_out_and_depth_cuts() -> None:
    run = made().search({"q": "b", "blank": " \n"}, 2)
    assert list(run["q"]) == ["y", "twin"]
    assert run["blank"] == {}
    assert made().search({}, 3) == {}


def test_the_corpus_is_embedded_in_chunks() -> None:
    encoder = LetterEncoder()
    retriever = DenseRetriever(encoder)
    retriever.index(Document(text.text, doc_id) for doc_id, text in random_corpus(600).items())
    assert encoder.batches == [256, 256, 88]


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_approximate_kinds_find_nearly_what_the_exact_one_finds(kind: Any) -> None:
    corpus = random_corpus(2000)
    queries = {f"q{number}": corpus[f"d{number}"].text for number in range(0, 2000, 50)}
    exact = made(corpus).search(queries, 10)
    found = made(corpus, faiss=FaissSettings(kind)).search(queries, 10)
    shared = [len(set(exact[q]) & set(found[q])) / 10 for q in queries]
    assert np.mean(shared) > 0.8
    again = made(corpus, faiss=FaissSettings(kind)).search(queries, 10)
    assert again == found


def test_ivf_looks_only_into_its_probes() -> None:
    corpus = random_corpus(1000)
    few = made(corpus, faiss=FaissSettings("ivf", ivf_lists=20, ivf_probes=1))
    all_lists = made(corpus, faiss=FaissSettings("ivf", ivf_lists=20, ivf_probes=20))
    assert len(few.search({"q": "abc"}, 1000)["q"]) < 300
    assert all_lists.search({"q": "abc"}, 50) == made(corpus).search({"q": "abc"}, 50)


def test_hnsw_gives_the_depth_that_is_asked_for() -> None:
    corpus = random_corpus(400)
    found = made(corpus, faiss=FaissSettings("hnsw", hnsw_search=1)).search({"q": "abc"}, 300)
    assert len(found["q"]) > 290


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_what_is_loaded_searches_as_what_was_saved(kind: Any, tmp_path: Path) -> None:
    corpus = random_corpus(300)
    retriever = made(corpus, faiss=FaissSettings(kind))
    retriever.save(tmp_path / "index")
    loaded = DenseRetriever.load(tmp_path / "index", corpus, model=LetterEncoder("elsewhere"))
    assert loaded.settings["kind"] == kind
    assert loaded.search({"q": "abc"}, 20) == retriever.search({"q": "abc"}, 20)


def test_an_index_of_another_model_settings_or_corpus_is_refused(tmp_path: Path) -> None:
    made().save(tmp_path / "index")
    with pytest.raises(IndexFolderError, match="embedded by 'letters', not by 'letters' as it is"):
        DenseRetriever.load(tmp_path / "index", model=LetterEncoder(salt="1"))
    with pytest.raises(IndexFolderError, match=r"kind='flat'.*not kind='hnsw'"):
        DenseRetriever(LetterEncoder(), faiss=FaissSettings("hnsw")).restore(tmp_path / "index")
    with pytest.raises(IndexFolderError, match="another corpus"):
        DenseRetriever(LetterEncoder()).restore(tmp_path / "index", {"x": CORPUS["x"]})


def test_vectors_without_a_direction_are_refused_by_name() -> None:
    with pytest.raises(NotFiniteError, match="gave 'odd' a vector of length 0"):
        made({"x": Document("ab"), "odd": Document("123")})

    class Broken(LetterEncoder):
        def encode_documents(self, texts: Sequence[str]) -> Any:
            return np.full((len(texts), self.dimension), np.nan)

    with pytest.raises(NotFiniteError, match="gave 'x' a vector of length nan"):
        DenseRetriever(Broken()).index(CORPUS)


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_a_corpus_without_text_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="none of the documents of the corpus has text"):
        made({"a": Document("")}, faiss=FaissSettings(kind))


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match=r"DenseRetriever\.search was called before index"):
        DenseRetriever(LetterEncoder()).search({"q": "a"}, 1)
    with pytest.raises(ValueError, match="depth must be"):
        made().search({"q": "a"}, 0)
    with pytest.raises(ValueError, match="no vector index 'pq': expected flat, ivf or hnsw"):
        FaissSettings("pq")
    with pytest.raises(ValueError, match="ivf_probes must be a whole number from 1, not 0"):
        FaissSettings("ivf", ivf_probes=0)
    with pytest.raises(ValueError, match="hnsw_links must be at least 2"):
        FaissSettings("hnsw", hnsw_links=1)
    with pytest.raises(ValueError, match="ivf_lists is 9, but there are 4 documents"):
        made(faiss=FaissSettings("ivf", ivf_lists=9))


@pytest.mark.parametrize("package", ["faiss", "sentence_transformers"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[dense\]'"):
        DenseRetriever()
