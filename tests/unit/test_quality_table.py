"""The table over collections: own candidate lists, systems by engine, goals and cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluations import CORPUS, beir_folder, words_system

from core_rerank.eval import FusedSystem
from core_rerank.eval.quality_table import (
    OWN_CANDIDATES,
    Collection,
    main,
    markdown,
    own_candidates,
    run_table,
    table_systems,
)
from core_rerank.eval.systems import AttentionSystem, attention_system, by_engine
from core_rerank.fusion import Fusion


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = beir_folder(tmp_path)
    rows = [
        {
            "query-id": f"q-{name}",
            "positives": [name],
            "negatives": [n for n in CORPUS if n != name],
        }
        for name in CORPUS
    ]
    rows[0]["negatives"] = []  # four questions of HotpotQA have none
    (folder / OWN_CANDIDATES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_collections_own_lists_are_shuffled_and_whole(data: Path) -> None:
    dataset = Collection("tiny", "test").load(data)
    found = own_candidates(data / "tiny", dataset)
    assert list(found.run["q-tides"]) == ["tides"]
    assert all(set(found.run[q]) == set(CORPUS) for q in dataset.queries if q != "q-tides")
    assert found.depth == len(CORPUS)
    places = [list(found.run[f"q-{name}"]).index(name) for name in CORPUS if name != "tides"]
    assert any(places), "the relevant document is not always first"
    assert own_candidates(data / "tiny", dataset) == found


def test_the_table_has_every_collection_and_goal(data: Path, tmp_path: Path) -> None:
    collections = [
        Collection("tiny", "test", OWN_CANDIDATES, goal=0.9, absolute=True),
        Collection("tiny", "test", "bm25", 3, limit=2, goal=0.04),
    ]
    fused = FusedSystem("words+rrf", "words", Fusion())
    results = []
    for number, collection in enumerate(collections):
        output = tmp_path / str(number)
        results += run_table([collection], [words_system(), fused], data, output, 4)
        assert (output / "tiny" / "report.html").is_file()
    lines = markdown(results).splitlines()
    assert lines[0] == "| nDCG@10 | tiny (6) | tiny (2) |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == [
        "| first-stage",
        "| words",
        "| words+rrf",
    ]
    assert "| goal | 0.90 | +0.04 |" in lines
    assert lines[3].count("; ") == 2, "a gain with its interval for both"
    assert lines[-1].startswith("| words | "), "its seconds; a fusion has none of its own"


def test_systems_share_two_engines(smollm2_dir: Path) -> None:
    model = attention_system(str(smollm2_dir), name="core-rerank", window=1)
    systems = [s for s in table_systems(model) if not isinstance(s, FusedSystem)]
    names = [[s.name for s in group] for group in by_engine(systems)]
    assert names[0][:2] == ["core-rerank", "listwise"]
    assert {"all-heads", "all-heads-listwise", "rankgpt"} <= {
        name for group in names[1:] for name in group
    }
    random = [s for s in systems if s.name.startswith("random-heads")]
    assert all(isinstance(s, AttentionSystem) and s.calibrated for s in random)


def test_an_unknown_system_is_named(smollm2_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--data", ".", "-o", "x", "--model", str(smollm2_dir), "--systems", "bert"])
    assert "no system bert: core-rerank, listwise" in capsys.readouterr().err
