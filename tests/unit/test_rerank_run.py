"""The reranking run with a reranker that needs no model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from core_rerank.eval.data import Dataset
from core_rerank.eval.rerank_run import first_stage, measure, rerank_candidates, write_trec
from core_rerank.types import Document, RankedDocument, Ranking

TEXTS = ["lava", "lava and ash", "ash, ash and lava", "bread"]
CORPUS = {f"d{i}": Document(text, f"d{i}") for i, text in enumerate(TEXTS)}
DATA = Dataset(
    "tiny/test",
    CORPUS,
    {"q1": "ash lava", "q2": "lava", "q3": "nothing known"},
    {"q1": {"d2": 1}, "q2": {"d2": 1}, "q3": {"d3": 1}},
)


class LongestFirst:
    """Scores a document by its length; remembers how many queries came at once."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def rerank_batch(self, jobs: Sequence[tuple[str, list[Document]]]) -> list[Ranking]:
        self.batches.append(len(jobs))
        rankings = []
        for query, documents in jobs:
            ordered = sorted(enumerate(documents), key=lambda pair: -len(pair[1].text))
            ranked = tuple(
                RankedDocument(index, document.doc_id, float(len(document.text)), rank, document)
                for rank, (index, document) in enumerate(ordered, start=1)
            )
            rankings.append(Ranking(query, ranked, "longest", "core"))
        return rankings


def test_candidates_are_reranked_and_measured(tmp_path: Path) -> None:
    candidates = first_stage(DATA, depth=3)
    assert set(candidates) == {"q1", "q2", "q3"}
    assert candidates["q3"] == {}
    reranker = LongestFirst()
    after = rerank_candidates(reranker, DATA, candidates, batch=1)
    assert reranker.batches == [1, 1]
    assert list(after["q2"]) == ["d2", "d1", "d0"]
    assert after["q3"] == {}
    old, new, low, high = measure(DATA, candidates, after)
    assert new == 2 / 3
    assert low <= new - old <= high
    write_trec(after, tmp_path / "run.trec", "tag")
    lines = (tmp_path / "run.trec").read_text().splitlines()
    assert lines[3] == "q2 Q0 d2 1 17 tag"
    assert len(lines) == 6


def test_a_folder_that_is_not_there_is_one_line_not_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from core_rerank.eval.rerank_run import main

    assert main(["--data", "nosuch", "--split", "test", "--backend", "transformers"]) == 2
    assert "error: nosuch/qrels/test.tsv is missing" in capsys.readouterr().err
