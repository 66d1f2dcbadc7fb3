"""A first stage's candidates: found, cut, kept, and refused when they are another's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from evaluations import CORPUS, DATA, beir_folder, run_file

from core_rerank.errors import DataError
from core_rerank.eval.candidates import FILE, find_candidates, removes_own_ids
from core_rerank.eval.data import load_beir
from core_rerank.types import Document


def test_a_search_and_the_texts_of_what_was_found(tmp_path: Path) -> None:
    data = load_beir(beir_folder(tmp_path), stream=True)
    found = find_candidates(data, "bm25", 2)
    assert list(found.run) == list(DATA.queries)
    assert next(iter(found.run["q-tides"])) == "tides"
    assert set(found.documents) == {d for scores in found.run.values() for d in scores}
    assert found.documents["tides"] == CORPUS["tides"]
    assert found.corpus["documents"] == len(CORPUS)
    assert all(len(scores) <= 2 for scores in found.run.values())


def test_a_kept_run_is_read_and_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"run:{run_file(tmp_path)}"
    first = find_candidates(DATA, spec, 3, keep=tmp_path)
    monkeypatch.setattr("core_rerank.retrievers.RunFileRetriever.search", None)
    again = find_candidates(DATA, spec, 3, keep=tmp_path)
    assert again == first
    assert again.digest == first.digest
    assert first.retriever == "run:first.trec"


def test_a_kept_run_of_something_else_is_refused(tmp_path: Path) -> None:
    spec = f"run:{run_file(tmp_path)}"
    find_candidates(DATA, spec, 3, keep=tmp_path)
    with pytest.raises(DataError, match="depth was 3, now 4"):
        find_candidates(DATA, spec, 4, keep=tmp_path)
    with pytest.raises(DataError, match="queries was"):
        find_candidates(DATA.first(2), spec, 3, keep=tmp_path)
    changed = {**CORPUS, "tides": Document("Something else.", "tides")}
    with pytest.raises(DataError, match="another corpus: sha256 was"):
        find_candidates(replace(DATA, corpus=changed), spec, 3, keep=tmp_path)
    (tmp_path / FILE).write_text('{"format": 1')
    with pytest.raises(DataError, match=r"candidates\.json is damaged"):
        find_candidates(DATA, spec, 3, keep=tmp_path)


def test_a_querys_own_document_is_taken_away_on_arguana_and_quora(tmp_path: Path) -> None:
    run = tmp_path / "own.trec"
    run.write_text("tides Q0 tides 1 3 t\ntides Q0 bread 2 2 t\ntides Q0 violin 3 1 t\n")
    data = replace(DATA, name="arguana/test", queries={"tides": "?"}, qrels={"tides": {"bread": 1}})
    assert removes_own_ids(data)
    assert not removes_own_ids(DATA)
    removed = find_candidates(data, f"run:{run}", 2)
    assert list(removed.run["tides"]) == ["bread", "violin"]
    assert removed.settings["identical_ids_removed"] is True
    kept = find_candidates(data, f"run:{run}", 2, ignore_identical_ids=False)
    assert list(kept.run["tides"]) == ["tides", "bread"]


def test_a_candidate_that_is_not_in_the_corpus_is_named(tmp_path: Path) -> None:
    spec = f"run:{run_file(tmp_path)}"
    less = {name: text for name, text in CORPUS.items() if name != "enzyme"}
    with pytest.raises(DataError, match="'enzyme' is not in the corpus"):
        find_candidates(replace(DATA, corpus=less), spec, 6)


def test_an_index_is_kept_for_the_next_time(tmp_path: Path) -> None:
    first = find_candidates(DATA, "bm25", 3, index=tmp_path / "index")
    manifest = json.loads((tmp_path / "index" / "index.json").read_text())
    assert manifest["kind"] == "bm25"
    assert find_candidates(DATA, "bm25", 3, index=tmp_path / "index").run == first.run
