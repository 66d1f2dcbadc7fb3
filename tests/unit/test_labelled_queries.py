"""Labelled queries: read from candidates.jsonl, or mined from judgements; refusals."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from core_rerank.errors import DataError
from core_rerank.labelled_queries import load_labelled_queries, mine_labelled_queries
from core_rerank.types import Document


def folder(
    path: Path, candidates: Sequence[object], queries: Sequence[object] = (), corpus: object = None
) -> Path:
    corpus = corpus or [
        {"_id": name, "title": name.upper(), "text": f"text of {name}"} for name in "abc"
    ]
    for name, rows in (
        ("corpus.jsonl", corpus),
        ("queries.jsonl", queries or [{"_id": "q", "text": "what?"}]),
        ("candidates.jsonl", candidates),
    ):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]  # type: ignore[union-attr]
        (path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(positives: object, negatives: object, query: str = "q") -> dict[str, object]:
    return {"query-id": query, "positives": positives, "negatives": negatives}


def test_a_folder_is_read(tmp_path: Path) -> None:
    (query,) = load_labelled_queries(folder(tmp_path, [row(["b"], ["a", "c", "a"])]))
    assert (query.query_id, query.query) == ("q", "what?")
    assert query.positives == (Document("text of b", "b", "B"),)
    assert [document.doc_id for document in query.negatives] == ["a", "c"]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    data = folder(tmp_path, [row(["a"], ["b"]), row(["b"], ["a"]), "not json"])
    assert [q.positives[0].doc_id for q in load_labelled_queries(data, 2)] == ["a", "b"]
    with pytest.raises(DataError, match="limit must be at least 1"):
        load_labelled_queries(data, 0)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([row(["a"], [])], "line 1: query 'q' has no negatives"),
        ([row([], ["a"])], "line 1: query 'q' has no positives"),
        ([row(["a"], "b")], "'negatives' must be a list"),
        ([row(["a"], [1])], "'negatives' must be a list"),
        ([{"query-id": "q", "positives": ["a"]}], "'negatives' must be a list"),
        ([row(["x"], ["a"])], "positive 'x' of query 'q' is not in corpus.jsonl"),
        ([row(["a"], ["x"])], "negative 'x' of query 'q' is not in corpus.jsonl"),
        ([row(["a"], ["b"]), row(["a"], ["a"])], "line 2: 'a' is both"),
        ([row(["a"], ["b"], query="other")], "query 'other' has no text"),
        ([row(["a"], ["b"]), "{"], "line 2 is not JSON"),
        ([["a"]], "line 1 is not a JSON object, but list"),
        ([], "is empty"),
    ],
)
def test_unusable_candidates_are_refused(
    tmp_path: Path, candidates: list[object], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_labelled_queries(folder(tmp_path, candidates))


def test_blank_documents_are_refused(tmp_path: Path) -> None:
    corpus = [{"_id": "a", "text": " "}, {"_id": "b", "text": "b"}]
    with pytest.raises(DataError, match="positive 'a' of query 'q' has no text"):
        load_labelled_queries(folder(tmp_path, [row(["a"], ["b"])], corpus=corpus))


def test_documents_and_queries_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    candidates = [row(["1"], ["b"])]
    corpus = [{"_id": name, "text": "x"} for name in (1, "b", "unused", "unused")]
    (query,) = load_labelled_queries(folder(tmp_path, candidates, corpus=corpus))
    assert query.positives == (Document("x", "1"),)
    with pytest.raises(DataError, match="line 5: document '1' is there twice"):
        load_labelled_queries(folder(tmp_path, candidates, corpus=[*corpus, corpus[0]]))
    twice = [{"_id": "q", "text": "what?"}] * 2
    with pytest.raises(DataError, match="line 2: query 'q' is there twice"):
        load_labelled_queries(folder(tmp_path, candidates, twice, corpus))


def test_missing_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").touch()
    with pytest.raises(DataError, match=r"lacks queries\.jsonl, candidates\.jsonl"):
        load_labelled_queries(tmp_path)


def test_every_file_may_be_compressed(tmp_path: Path) -> None:
    plain = load_labelled_queries(folder(tmp_path, [row(["b"], ["a"])]))
    for path in list(tmp_path.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert load_labelled_queries(tmp_path) == plain


def test_negatives_takes_the_first_of_each_row(tmp_path: Path) -> None:
    data = folder(tmp_path, [row(["b"], ["c", "a"])])
    (query,) = load_labelled_queries(data, negatives=1)
    assert [document.doc_id for document in query.negatives] == ["c"]
    with pytest.raises(DataError, match="negatives must be at least 1, not 0"):
        load_labelled_queries(data, negatives=0)


# ---------------------------------------------------------------- mined from judgements

CORPUS = {name: Document(f"text of {name}", name) for name in "abcde"} | {
    "copy": Document("text of a", "copy"),
    "blank": Document(" ", "blank"),
}


def test_hard_negatives_are_the_first_stages_best_mistakes() -> None:
    qrels = {"q": {"a": 1, "b": 2, "c": 0}}
    run = {"q": {"d": 1.0, "copy": 9.0, "a": 8.0, "c": 5.0, "e": 0.5, "blank": 4.0}}
    (query,) = mine_labelled_queries(CORPUS, {"q": "what?"}, qrels, run, 2)
    assert [d.doc_id for d in query.positives] == ["a", "b"]
    assert [d.doc_id for d in query.negatives] == ["c", "d"]


def test_queries_without_positives_or_negatives_are_left_out_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queries = dict.fromkeys(("good", "alone", "unjudged"), "what?")
    qrels = {"good": {"a": 1}, "alone": {"a": 1}, "unjudged": {"a": 0}}
    run = {"good": {"b": 1.0}, "alone": {"a": 1.0}, "unjudged": {"b": 1.0}}
    with caplog.at_level(logging.WARNING):
        (query,) = mine_labelled_queries(CORPUS, queries, qrels, run, 5)
    assert query.query_id == "good"
    assert "left out 2 of 3 queries, without positives or hard negatives: alone" in caplog.text
    del qrels["good"]
    with pytest.raises(DataError, match="none of 2 queries has both a positive and a hard"):
        mine_labelled_queries(CORPUS, queries, qrels, run, 5)


@pytest.mark.parametrize("positive", ["gone", "blank"])
def test_a_positive_must_be_in_the_corpus(positive: str) -> None:
    with pytest.raises(DataError, match=f"'{positive}', judged relevant to query 'q', is not in"):
        mine_labelled_queries(CORPUS, {"q": "?"}, {"q": {positive: 1}}, {"q": {"b": 1.0}}, 5)
