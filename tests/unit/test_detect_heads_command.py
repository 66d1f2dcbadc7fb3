"""``detect-heads`` on a backend with a planted head: stores, methods, mining, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from planted import PLANTED, PlantedBackend, labelled
from typer.testing import CliRunner

from core_rerank.backends import OpenBackend
from core_rerank.cli import app
from core_rerank.commands.mining import mine_hard_negatives
from core_rerank.head_store import AttentionStore
from core_rerank.heads import HeadSet

pytest.importorskip("bm25s")

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def backend(smollm2_tokenizer: Any) -> PlantedBackend:
    return PlantedBackend(smollm2_tokenizer)


@pytest.fixture
def starts() -> list[str]:
    """The models that were started."""
    return []


@pytest.fixture
def detect(
    backend: PlantedBackend, starts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    """The command in ``tmp_path``, where DATA is a folder with candidates and judgements."""

    def open_backend(_: str, resolved: Any, *__: Any) -> OpenBackend:
        starts.append(resolved.model_id)
        return OpenBackend(backend, backend.model, resolved.model_id, close=lambda: None)

    write_folder(tmp_path / "DATA")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core_rerank.backends.open_backend", open_backend)
    return lambda *arguments: CliRunner().invoke(app, ["detect-heads", *arguments])


def write_folder(folder: Path, count: int = 24) -> None:
    """Queries that share no documents; judgements name one positive each."""
    corpus, queries, candidates, judged = [], [], [], ["query-id\tcorpus-id\tscore"]
    for query in labelled(count):
        names = [f"{query.query_id}-{i}" for i in range(3)]
        documents = (*query.positives, *query.negatives)
        corpus += [
            {"_id": name, "text": f"{document.text} {name}"}
            for name, document in zip(names, documents, strict=True)
        ]
        queries.append({"_id": query.query_id, "text": query.query})
        candidates.append(
            {"query-id": query.query_id, "positives": names[:1], "negatives": names[1:]}
        )
        judged.append(f"{query.query_id}\t{names[0]}\t1")
    folder.mkdir()
    for file, rows in (("corpus", corpus), ("queries", queries), ("candidates", candidates)):
        (folder / f"{file}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "qrels").mkdir()
    (folder / "qrels" / "test.tsv").write_text("\n".join(judged))


MEASURE = ("--data", "DATA", "--model", "some/model")


def test_one_pass_then_any_method_without_an_engine(
    detect: Command, starts: list[str], tmp_path: Path
) -> None:
    result = detect(*MEASURE, "--k", "1", "-o", "heads.yaml")
    assert result.exit_code == 0, result.output
    assert starts == ["some/model"]
    assert "24 labelled queries in DATA, 72 documents" in result.stderr
    assert "what was measured is in heads.store" in result.stderr
    assert "Stability: 3 disjoint samples of 8 queries share 100%" in result.stdout
    head_set = HeadSet.from_yaml("heads.yaml")
    assert (head_set.heads, head_set.method, head_set.data) == (
        (PLANTED,),
        "core",
        "DATA, 24 queries",
    )
    assert head_set.found_with["store_hash"] == AttentionStore.open("heads.store").digest()
    assert head_set.found_with["held_out_ndcg_at_10"] == "1.0000"
    assert (head_set.found_with["positives"], head_set.found_with["negatives"]) == ("24", "48")
    for method in ("qr", "ndcg", "weighted", "signed"):
        again = detect("--store", "heads.store", "--method", method, "--k", "2", "-o", "b.yaml")
        assert again.exit_code == 0, again.output
        found = HeadSet.from_yaml("b.yaml")
        assert (found.heads[0], found.method) == (PLANTED, method)
        assert (found.weights is not None) == (method in ("weighted", "signed"))
    assert starts == ["some/model"]
    same = detect(*MEASURE, "--k", "1", "-o", "heads.yaml")
    assert "all of them are in heads.store" in same.stderr
    assert starts == ["some/model"]
    assert HeadSet.from_yaml("heads.yaml") == head_set


def test_heads_are_chosen_from_several_stores(detect: Command) -> None:
    assert detect(*MEASURE, "--limit", "10", "--k", "1", "-o", "a.yaml").exit_code == 0
    write_folder(Path("MORE"))
    more = ("--data", "MORE", "--model", "some/model", "--negatives", "1")
    assert detect(*more, "--k", "1", "-o", "b.yaml").exit_code == 0
    both = ("--store", "a.store", "--store", "b.store")
    result = detect(*both, "--k", "1", "-o", "both.yaml")
    assert result.exit_code == 0, result.output
    assert HeadSet.from_yaml("both.yaml").data == "DATA + MORE, 34 queries"
    refused = detect(*MEASURE, *both)
    assert refused.exit_code == 2
    assert "--data measures into one --store" in refused.stderr


def test_a_stopped_run_goes_on(detect: Command, starts: list[str], backend: PlantedBackend) -> None:
    assert detect(*MEASURE, "-o", "heads.yaml", "--k", "1").exit_code == 0
    whole = Path("heads.yaml").read_bytes()
    for path in list(Path("heads.store").glob("0000*"))[:4]:
        path.unlink()
    without = detect("--store", "heads.store", "--k", "1")
    assert without.exit_code == 2
    assert "holds 20 of 24 queries: measure the rest" in without.stderr
    calls = backend.calls
    result = detect(*MEASURE, "-o", "heads.yaml", "--k", "1")
    assert "going on in heads.store: 4 queries are missing" in result.stderr
    assert backend.calls == calls + 4
    assert len(starts) == 2
    assert Path("heads.yaml").read_bytes() == whole


def test_other_inputs_are_refused_before_an_engine_starts(
    detect: Command, starts: list[str]
) -> None:
    assert detect(*MEASURE, "--k", "1").exit_code == 0
    for arguments, message in (
        (["--store", "heads.store", "--model", "some/other"], "model was 'some/model', now"),
        (["--data", "DATA", "--model", "some/other"], "model was 'some/model', now 'some/other'"),
        ([*MEASURE, "--window", "all"], "window was 1, now 'all'"),
        ([*MEASURE, "--limit", "20"], "data_hash was"),
        ([*MEASURE, "--split", "test"], "data_hash was"),
        ([*MEASURE, "--seed", "2"], "seed was 0, now 2"),
    ):
        result = detect(*arguments, "--k", "1")
        assert result.exit_code == 2, result.output
        assert message in result.stderr
        assert "another folder" in result.stderr
    assert len(starts) == 1


def test_options_of_measuring_need_data(detect: Command) -> None:
    assert detect(*MEASURE, "--k", "1").exit_code == 0
    for option, value in (("--window", "all"), ("--limit", "3"), ("--seed", "0"), ("--split", "x")):
        result = detect("--store", "heads.store", option, value, "--k", "1")
        assert result.exit_code == 2
        assert f"{option} cannot change what is measured already" in result.stderr


def test_a_damaged_store_is_told_in_one_line(detect: Command) -> None:
    assert detect(*MEASURE, "--k", "1").exit_code == 0
    path = next(Path("heads.store").glob("00003-*"))
    path.write_bytes(path.read_bytes()[:-1])
    result = detect("--store", "heads.store", "--k", "1")
    assert result.exit_code == 2
    assert f"{path.name} is damaged" in result.stderr
    assert "Traceback" not in result.output


def test_the_picture_is_beside_the_head_set(
    detect: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    assert detect(*MEASURE, "--k", "1", "-o", "x.yaml").exit_code == 0
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    Path("x.png").unlink()
    monkeypatch.setattr("core_rerank.pictures.find_spec", lambda _: None)
    result = detect("--store", "x.store", "--k", "1", "-o", "x.yaml")
    assert result.exit_code == 0
    assert "no picture: it needs matplotlib" in result.stderr
    refused = detect("--store", "x.store", "--k", "1", "--picture", "x.png")
    assert refused.exit_code != 0
    assert "pip install 'core-rerank[plots]'" in refused.stderr
    assert not Path("x.png").exists()


def test_hard_negatives_come_from_judgements_and_bm25(detect: Command, tmp_path: Path) -> None:
    result = detect(*MEASURE, "--split", "test", "--negatives", "2", "--k", "1")
    assert result.exit_code == 0, result.output
    head_set = HeadSet.from_yaml("heads.yaml")
    assert head_set.data == "DATA/test with BM25 negatives, 24 queries"
    queries = mine_hard_negatives(tmp_path / "DATA", "test", 5, 2)
    assert [query.query_id for query in queries] == ["q0", "q1", "q2", "q3", "q4"]
    for query in queries:
        assert [d.doc_id for d in query.positives] == [f"{query.query_id}-0"]
        assert len(query.negatives) == 2
        word = query.query.split()[-1]
        assert all(word in document.text for document in query.negatives)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "best"), "'best' is not one of"),
        (("--k", "7"), "cannot choose 7 heads of some/model: 3 layers of 2 heads are 6"),
        (("--window", "all", "--orders", "9"), "orders must be 1 to 5, not 9"),
        (("--split", "nowhere"), "nowhere.tsv is missing. Splits there are: test"),
    ],
)
def test_mistakes_are_told(detect: Command, arguments: tuple[str, ...], message: str) -> None:
    result = detect(*MEASURE, *arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not Path("heads.yaml").exists()
