"""The harness with rankers that need no model: rankings, failures, going on, the report."""

from __future__ import annotations

import csv
import io
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evaluations import DATA, QUERIES, WordRanker, run_file, words_system

from core_rerank.errors import DataError, PromptError
from core_rerank.eval import Candidates, FusedSystem, RankerSystem, evaluate, find_candidates
from core_rerank.eval.measures import ndcg
from core_rerank.eval.rivals.base import RankerResult
from core_rerank.fusion import Fusion
from core_rerank.retrievers import read_run

FINAL = ("run-first-stage.trec", "run-words.trec", "per_query.csv")
SECOND = 1 / math.log2(3)


@pytest.fixture
def candidates(tmp_path: Path) -> Candidates:
    return find_candidates(DATA, f"run:{run_file(tmp_path)}", 5)


class Interrupted(Exception):
    """Stands for a kill: nothing in the harness expects it."""


def stopping_after(batches: int) -> WordRanker:
    ranker = WordRanker()
    whole = ranker.rank_batch

    def rank_batch(tasks: Any) -> list[RankerResult]:
        if len(ranker.batches) > batches:  # the warm-up is the first
            raise Interrupted
        return whole(tasks)

    ranker.rank_batch = rank_batch
    return ranker


def without_cost(path: Path) -> Any:
    metrics = json.loads(path.read_text())
    del metrics["finished"]
    for system in metrics["systems"]:
        del system["cost"]
    return metrics


def test_systems_are_measured_beside_the_first_stage(candidates: Candidates) -> None:
    report = evaluate(DATA, [words_system()], candidates)
    first, words = report.systems
    assert [first.name, words.name] == ["first-stage", "words"]
    assert first.means["nDCG@10"] == pytest.approx(SECOND)
    assert words.means["nDCG@10"] == words.means["MRR@10"] == 1.0
    assert first.comparison is None
    assert words.comparison is not None
    assert words.comparison.difference == pytest.approx(1 - SECOND)
    assert words.comparison.p == pytest.approx(2 / 2**6)
    assert words.interval == (1.0, 1.0)
    assert words.cost.seconds_per_query == 0.5
    assert words.cost.input_tokens == 60
    assert report["words"] is words
    with pytest.raises(KeyError, match="there are first-stage, words"):
        report["icr"]


def test_queries_go_in_batches_after_a_warm_up(candidates: Candidates) -> None:
    ranker = WordRanker()
    evaluate(DATA, [words_system(ranker)], candidates, batch=4)
    assert [len(batch) for batch in ranker.batches] == [1, 4, 2]
    assert [q for batch in ranker.batches[1:] for q in batch] == list(QUERIES.values())


def test_the_depth_curve_is_what_shallower_candidates_would_give(candidates: Candidates) -> None:
    report = evaluate(
        DATA, [words_system(), words_system(name="list", pointwise=False)], candidates
    )
    curve = report["words"].depth_curve
    assert list(curve) == [1, 2, 3, 5]
    for depth, value in curve.items():
        cut = {q: dict(list(s.items())[:depth]) for q, s in candidates.run.items()}
        shallow = replace(candidates, run=cut, depth=depth)
        again = evaluate(DATA, [words_system()], shallow)["words"]
        assert again.means["nDCG@10"] == value
    assert report["words"].depth_curve_exact
    assert not report["list"].depth_curve_exact
    assert report["first-stage"].depth_curve[1] == 0.0


def test_fusion_is_computed_from_the_same_rankings(candidates: Candidates) -> None:
    ranker = WordRanker()
    systems = [
        words_system(ranker),
        FusedSystem("words+rrf", "words", Fusion()),
        FusedSystem("words+1", "words", Fusion(1.0)),
        FusedSystem("words+0", "words", Fusion(0.0)),
    ]
    report = evaluate(DATA, systems, candidates)
    assert len(ranker.batches) == 2
    run = report["words+rrf"].run["q-bread"]
    assert run["bread"] == pytest.approx(1 / 62 + 1 / 61)
    assert list(report["words+1"].run["q-bread"]) == list(report["words"].run["q-bread"])
    assert list(report["words+0"].run["q-bread"]) == list(candidates.run["q-bread"])
    assert report["words+0"].depth_curve == report["first-stage"].depth_curve


def test_a_ranker_that_gives_an_order_only(candidates: Candidates) -> None:
    class Reversed(WordRanker):
        def rank_batch(self, tasks: Any) -> list[RankerResult]:
            return [
                RankerResult(tuple(reversed(range(len(t)))), None, 0.1, 5, 3, 1) for _, t in tasks
            ]

    systems = [RankerSystem("back", Reversed), FusedSystem("back+rrf", "back", Fusion())]
    report = evaluate(DATA, systems, candidates)
    back = report["back"]
    assert list(back.run["q-tides"]) == list(reversed(candidates.run["q-tides"]))
    assert list(back.run["q-tides"].values()) == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert back.length_correlation is None
    assert (back.mended, back.cost.output_tokens) == (6, 18)
    # A list fused with its reverse ties in pairs, and keeps the first stage's order there.
    assert next(iter(report["back+rrf"].run["q-tides"])) == next(iter(candidates.run["q-tides"]))


def test_a_query_that_fails_is_named_and_counts_zero(
    candidates: Candidates, tmp_path: Path
) -> None:
    def score(query: str, text: str) -> float:
        if "violin" in query:
            raise PromptError("the query is too long.")
        return math.nan if "copper" in query.lower() else 1.0

    ranker = WordRanker(score)
    report = evaluate(DATA, [words_system(ranker)], candidates, batch=3, output=tmp_path / "out")
    words = report["words"]
    assert words.failed == {
        "q-violin": "PromptError: the query is too long.",
        "q-copper": "NotFiniteError: a score is NaN or infinite",
    }
    assert [len(batch) for batch in ranker.batches] == [1, 3, 1, 1, 1, 3]
    assert words.measures["nDCG@10"]["q-violin"] == 0.0
    assert words.means["nDCG@10"] == pytest.approx(4 * SECOND / 6)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out" / "per_query.csv").read_text())))
    failed = [(r["query_id"], r["error"]) for r in rows if r["status"] == "failed"]
    assert failed == list(words.failed.items())
    assert "the query is too long." in (tmp_path / "out" / "report.html").read_text()
    again = evaluate(DATA, [words_system()], candidates, batch=3, output=tmp_path / "out")
    assert again["words"].failed == words.failed


def test_queries_without_candidates_count_zero(tmp_path: Path, candidates: Candidates) -> None:
    fewer = {**candidates.run, "q-tides": {}}
    report = evaluate(DATA, [words_system()], replace(candidates, run=fewer), output=tmp_path / "o")
    assert report["words"].means["nDCG@10"] == pytest.approx(5 / 6)
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    assert metrics["first_stage"]["queries_without_candidates"] == ["q-tides"]
    assert "q-tides,words,no candidates,0.000000" in (tmp_path / "o" / "per_query.csv").read_text()


def test_what_was_stopped_goes_on_and_gives_the_same_files(
    candidates: Candidates, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    evaluate(DATA, [words_system()], candidates, batch=2, output=whole)
    with pytest.raises(Interrupted):
        evaluate(DATA, [words_system(stopping_after(2))], candidates, batch=2, output=parts)
    assert not (parts / "metrics.json").exists()
    ranker = WordRanker()
    evaluate(DATA, [words_system(ranker)], candidates, batch=2, output=parts)
    assert [len(batch) for batch in ranker.batches] == [1, 2]
    for name in FINAL:
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert without_cost(whole / "metrics.json") == without_cost(parts / "metrics.json")


def test_a_finished_folder_needs_no_ranker_and_takes_another_system(
    candidates: Candidates, tmp_path: Path
) -> None:
    evaluate(DATA, [words_system()], candidates, output=tmp_path / "o")

    def none() -> WordRanker:
        raise AssertionError("a ranker was made")

    done = RankerSystem("words", none, {"version": 1}, True)
    report = evaluate(DATA, [done, words_system(name="more")], candidates, output=tmp_path / "o")
    assert [s.means["nDCG@10"] for s in report.systems[1:]] == [1.0, 1.0]


def test_a_folder_of_other_settings_is_refused(candidates: Candidates, tmp_path: Path) -> None:
    evaluate(DATA, [words_system()], candidates, output=tmp_path / "o")
    other = RankerSystem("words", WordRanker, {"version": 2}, True)
    with pytest.raises(DataError, match=r"system\.version was 1, now 2"):
        evaluate(DATA, [other], candidates, output=tmp_path / "o")
    with pytest.raises(DataError, match="batch was 8, now 3"):
        evaluate(DATA, [words_system()], candidates, batch=3, output=tmp_path / "o")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="is a file"):
        evaluate(DATA, [words_system()], candidates, output=tmp_path / "file")


def test_two_processes_do_not_write_into_one_folder(candidates: Candidates, tmp_path: Path) -> None:
    reached, go = threading.Event(), threading.Event()

    def score(query: str, text: str) -> float:
        reached.set()
        assert go.wait(30)
        return 1.0

    slow = words_system(WordRanker(score))
    first = threading.Thread(
        target=evaluate, args=(DATA, [slow], candidates), kwargs={"output": tmp_path / "o"}
    )
    first.start()
    try:
        assert reached.wait(30)
        with pytest.raises(DataError, match="another process is evaluating"):
            evaluate(DATA, [words_system()], candidates, output=tmp_path / "o")
    finally:
        go.set()
        first.join()
    assert (tmp_path / "o" / "metrics.json").is_file()


def test_the_runs_are_trec_files_that_measure_alike(candidates: Candidates, tmp_path: Path) -> None:
    report = evaluate(DATA, [words_system()], candidates, output=tmp_path / "o")
    for system in report.systems:
        run = read_run(tmp_path / "o" / f"run-{system.name}.trec")
        assert [list(scores) for scores in run.values()] == [list(s) for s in system.run.values()]
        assert ndcg(DATA.qrels, run) == system.measures["nDCG@10"]


def test_the_page_needs_nothing_else_and_escapes_texts(
    candidates: Candidates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = replace(DATA, name="<script>alert(1)</script>")
    evaluate(data, [words_system()], candidates, output=tmp_path / "o")
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count('<img src="data:image/svg+xml;base64,') == 3
    assert "http" not in page.replace("http-equiv", "")
    monkeypatch.setattr("core_rerank.eval.report_page.can_draw", lambda: False)
    evaluate(data, [words_system()], candidates, output=tmp_path / "o")
    page = (tmp_path / "o" / "report.html").read_text()
    assert "<img" not in page
    assert "core-rerank[plots]" in page


def test_every_key_of_metrics_json_is_documented(candidates: Candidates, tmp_path: Path) -> None:
    evaluate(DATA, [words_system()], candidates, output=tmp_path / "o")
    metrics = json.loads((tmp_path / "o" / "metrics.json").read_text())
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    system = metrics["systems"][1]
    parts = [metrics["data"], metrics["first_stage"], metrics["rules"], metrics["statistics"]]
    parts += [system, system["cost"], system["against_first_stage"], metrics["environment"]]
    for key in {key for part in [metrics, *parts] for key in part}:
        assert f"`{key}`" in text, key


def test_names_that_would_share_a_file_are_refused(candidates: Candidates) -> None:
    for systems, message in (
        ([], "no system to evaluate"),
        ([words_system(), words_system()], "files called 'words'"),
        ([words_system(name="a:b"), words_system(name="a-b")], "files called 'a-b'"),
        ([words_system(name="first-stage")], "files called 'first-stage'"),
        ([words_system(), FusedSystem("f", "icr", Fusion())], "fuses 'icr', .* evaluate it too"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluate(DATA, systems, candidates)
    with pytest.raises(ValueError, match="batch must be"):
        evaluate(DATA, [words_system()], candidates, batch=0)
