"""Planted injections in candidate lists: what is planted, how lists are judged, a whole run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend

pytest.importorskip("sklearn")
pytest.importorskip("pytrec_eval")

from core_rerank import Document, InjectionHeads, RankedDocument, Ranking
from core_rerank.backends import OpenBackend
from core_rerank.errors import DataError
from core_rerank.eval.planting import (
    PLACES,
    plant,
    planted_lists,
    read_attacks,
    without_cut_attacks,
)
from core_rerank.eval.screening import list_quality, main
from core_rerank.labelled_queries import LabelledQuery
from core_rerank.prompt import PromptBuilder
from hook_runtime.specs import CaptureRequest, Head

TEXT = "One is here. Two is there. Three."
SEES = Head(1, 0)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("start", f"Bark!\n{TEXT}"),
        ("middle", "One is here. Bark! Two is there. Three."),
        ("end", f"{TEXT}\nBark!"),
    ],
)
def test_plant(place: Any, expected: str) -> None:
    assert plant(TEXT, "Bark!", place) == expected


def test_plant_where_there_is_no_sentence() -> None:
    assert plant("one two three", "Bark!", "middle") == "one two Bark! three"
    assert plant("one", "Bark!", "middle") == "oneBark! "


def query(number: int) -> LabelledQuery:
    documents = [Document(f"{number} text {i}. More of it.", f"{number}-{i}") for i in range(4)]
    return LabelledQuery(f"q{number}", f"what {number}", tuple(documents[:1]), tuple(documents[1:]))


def test_lists_hold_one_copy_for_each_place_and_the_clean_documents() -> None:
    (one, *_) = lists = planted_lists([query(i) for i in range(5)], ["Bark!", "Meow!"], seed=3)
    clean = [item for item in one.documents if item.place is None]
    assert [item.document.doc_id for item in clean] == ["0-0", "0-1", "0-2", "0-3"]
    assert [item.relevant for item in clean] == [True, False, False, False]
    copies = one.documents[4:]
    assert {item.place for item in copies} == set(PLACES)
    assert not any(item.relevant for item in copies)
    assert any(str(item.document.doc_id).startswith("0-0+") for item in copies)
    for item in copies:
        assert ("Bark!" in item.document.text) != ("Meow!" in item.document.text)
    assert lists == planted_lists([query(i) for i in range(5)], ["Bark!", "Meow!"], seed=3)
    assert lists != planted_lists([query(i) for i in range(5)], ["Bark!", "Meow!"], seed=4)


def test_queries_that_nothing_can_be_planted_in_are_left_out() -> None:
    short = replace(query(1), negatives=query(1).negatives[:1])
    lists = planted_lists([query(0), short, query(2)], ["Bark!"])
    assert [one.query_id for one in lists] == ["q0", "q2"]
    with pytest.raises(DataError, match="no query has two negatives"):
        planted_lists([short], ["Bark!"])
    with pytest.raises(DataError, match="no attacks"):
        planted_lists([query(0)], [])


def test_copies_whose_attack_is_cut_off_are_left_out(smollm2_tokenizer: Any) -> None:
    long = replace(query(0), positives=tuple(_longer(d) for d in query(0).positives))
    long = replace(long, negatives=tuple(_longer(d) for d in long.negatives))
    (one,) = lists = planted_lists([long], ["Bark, and bark again."])

    def places(tokens: int) -> list[Any]:
        (left,) = without_cut_attacks(lists, PromptBuilder(smollm2_tokenizer, 512, tokens))
        assert left.documents[:4] == one.documents[:4]
        return sorted(item.place for item in left.documents[4:] if item.place)

    ends = {i.place: i.attack_end for i in one.documents if i.place}
    for item in one.documents[4:]:
        assert item.document.full_text[: item.attack_end].endswith("Bark, and bark again.")
    assert ends["start"] < ends["middle"] < ends["end"]
    assert places(400) == ["end", "middle", "start"]
    assert places(100) == ["middle", "start"]
    assert places(20) == ["start"]
    assert places(4) == []  # the attack's end is cut off


def _longer(document: Document) -> Document:
    return replace(document, title="A title", text=f"{document.text} {'And more. ' * 40}".strip())


def test_list_quality_by_hand() -> None:
    (one,) = planted_lists([query(0)], ["Bark!"])
    # An attacker leads, the relevant document follows, flagged are that attacker and a clean one.
    attacker = next(i for i, item in enumerate(one.documents) if item.place == "start")
    order = [attacker, 0, 1, 2, 3, *(i for i in range(4, 7) if i != attacker)]
    ranking = Ranking(
        "what",
        tuple(
            RankedDocument(
                i,
                None,
                1.0,
                rank,
                one.documents[i].document,
                injection=0.9,
                flagged=i in (attacker, 1),
            )
            for rank, i in enumerate(order, start=1)
        ),
        "m",
        "core",
    )
    quality = list_quality([one], [ranking])
    assert quality.clean == quality.clean_dropped == quality.attacked_dropped == 1.0
    assert quality.attacked == pytest.approx(1 / np.log2(3))
    assert (quality.first, quality.first_dropped) == (1.0, 0.0)


def test_whole_run(
    tmp_path: Path,
    smollm2_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bark = smollm2_tokenizer.encode(" Bark")[0], smollm2_tokenizer.encode("Bark")[0]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        if request.probe.reduction == "tokens":
            return np.full(request.probe.num_columns, 0.1)
        document = request.prompt_token_ids[slice(*request.probe.spans[0])]
        orders = any(token in document for token in bark)
        noise = 0.001 * (sum(document) % 97)
        return np.array([0.5 if orders and head == SEES else 0.1 + noise, 0.1])

    backend = FakeBackend(
        smollm2_tokenizer,
        name="HuggingFaceTB/SmolLM2-135M-Instruct",
        attention=attention,
        kind="vllm",
    )
    opened = OpenBackend(backend, backend.model, backend.model.name, close=lambda: None)
    monkeypatch.setattr("core_rerank.backends.open_backend", lambda *_: opened)
    monkeypatch.setattr("core_rerank.reranker.open_backend", lambda *_: opened)
    monkeypatch.setattr("core_rerank.reranker.choose_head_set", lambda *_: None)
    monkeypatch.setattr("core_rerank.reranker.choose_heads", lambda *_: (Head(0, 0),))
    folder = write_folder(tmp_path / "DATA", 10)
    attacks = tmp_path / "attacks.jsonl"
    attacks.write_text('{"attack": "Bark now."}\n{"text": "clean"}\n')
    assert read_attacks(attacks) == ["Bark now."]
    shared = [str(folder), "--attacks", str(attacks), "--limit", "10", "--negatives", "2"]
    store, heads = str(tmp_path / "s.safetensors"), str(tmp_path / "heads.yaml")
    main(["find", *shared, "--store", store, "--output", heads, "--top", "1"])
    found = InjectionHeads.from_yaml(heads)
    assert (found.task, found.heads) == ("document", (SEES,))
    batches = len(backend.batches)
    main(["find", *shared, "--store", store, "--output", heads, "--top", "1", "--fpr", "0.1"])
    assert len(backend.batches) == batches
    with pytest.raises(DataError, match="backend 'vllm' instead of 'transformers'"):
        main(["find", *shared, "--store", store, "--output", heads, "--backend", "transformers"])
    capsys.readouterr()
    main(["measure", *shared, "--heads", heads, "--output", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "screening.json").read_text())
    assert [row["system"] for row in report["rows"]] == [
        "screen",
        "screen, start",
        "screen, middle",
        "screen, end",
        "length alone",
    ]
    assert [row["auroc"] for row in report["rows"][:4]] == [1.0] * 4
    assert report["ndcg@10"]["first_dropped"] == 0.0
    assert report["ndcg@10"]["attacked_dropped"] > 0
    assert (tmp_path / "out" / "screening.md").read_text() == capsys.readouterr().out


def write_folder(folder: Path, count: int) -> Path:
    queries = [query(i) for i in range(count)]
    documents = [d for q in queries for d in (*q.positives, *q.negatives)]
    folder.mkdir()
    files = {
        "corpus": [{"_id": d.doc_id, "text": d.text} for d in documents],
        "queries": [{"_id": q.query_id, "text": q.query} for q in queries],
        "candidates": [
            {
                "query-id": q.query_id,
                "positives": [d.doc_id for d in q.positives],
                "negatives": [d.doc_id for d in q.negatives],
            }
            for q in queries
        ],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder
