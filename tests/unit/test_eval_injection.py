"""The injection evaluation: figures by hand, families left out, splits without overlap."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from core_rerank.errors import DataError
from core_rerank.eval.injection import LabelledScores, draw, family, main, measure, table
from core_rerank.eval.injection_sets import main as split
from core_rerank.eval.injection_sets import split_rows
from core_rerank.injection_data import load_labelled_texts
from core_rerank.injection_measuring import (
    InjectionAttention,
    InjectionMeasurement,
    Wanted,
    data_hash,
    load_measured,
)
from hook_runtime.specs import ModelInfo


def test_figures_by_hand() -> None:
    scores = np.array([0.1, 0.2, 0.3, 0.8, 0.25, 0.7, 0.9])
    attack = np.array([False] * 4 + [True] * 3)
    row = measure(LabelledScores("s", "d", scores, attack, {0.01: 0.75, 0.05: 0.22}))
    assert (row.benign, row.attacks) == (4, 3)
    assert row.auroc == pytest.approx((2 + 3 + 4) / 12)
    assert row.tpr == pytest.approx({0.01: 1 / 3, 0.05: 1 / 3})
    assert row.caught == pytest.approx({0.01: 1 / 3, 0.05: 1.0})
    assert row.alarms == pytest.approx({0.01: 1 / 4, 0.05: 2 / 4})


def test_benign_texts_alone_have_a_false_positive_rate_only() -> None:
    row = measure(
        LabelledScores("s", "calm", np.array([0.1, 0.9]), np.zeros(2, bool), {0.01: 0.5, 0.05: 0.0})
    )
    assert (row.auroc, row.auprc, row.tpr, row.caught) == (None, None, None, None)
    assert row.alarms == {0.01: 0.5, 0.05: 1.0}
    assert "| calm (2 / 0) | s |  |  |  |  |  / .500 |  / 1.000 |" in table([row])


def test_a_store_fits_or_is_refused_for_what_differs(tmp_path: Path) -> None:
    path = tmp_path / "store" / "a.safetensors"
    texts = load_labelled_texts(store(tmp_path, "a", 0))
    fits = Wanted("test/m", "vllm", data_hash(texts), "Say")
    for layers in (None, 1, 2, 9):
        assert len(load_measured(path, replace(fits, layers=layers)).attack) == 60
    for said, other in (
        ("model 'test/m' instead of 'test/n'", {"model": "test/n"}),
        ("backend 'vllm' instead of 'transformers'", {"backend": "transformers"}),
        ("instruction 'Say' instead of 'Do'", {"instruction": "Do"}),
        ("other texts", {"data_hash": data_hash(texts[1:])}),
    ):
        with pytest.raises(DataError, match=f"measured with {said}: give another --store"):
            load_measured(path, replace(fits, **other))
    whole = InjectionAttention.load(path)
    short = replace(whole.measurement.model, layers_kept=1)
    replace(whole, measurement=replace(whole.measurement, model=short)).save(path)
    assert load_measured(path, replace(fits, layers=1)).measurement.model == short
    for layers in (None, 2):
        with pytest.raises(DataError, match="the first 1 layers instead of 2"):
            load_measured(path, replace(fits, layers=layers))


def test_no_picture_without_matplotlib_or_a_set_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = np.linspace(0, 1, 16)
    both = LabelledScores("signed", "d", scores, scores > 0.5, {})
    calm = LabelledScores("signed", "calm", scores, np.zeros(16, bool), {})
    control = LabelledScores("length alone", "d", scores, scores > 0.5, {})
    path = tmp_path / "injection.svg"
    assert not draw([calm, control], path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        patch.setattr("core_rerank.eval.injection.can_draw", lambda: False)
        assert not draw([both], path)
    assert not path.exists()
    pytest.importorskip("matplotlib")
    assert draw([both, calm], path)
    first = path.read_bytes()
    assert draw([both, calm], path)
    assert path.read_bytes() == first


def test_every_line_of_the_table_has_as_many_cells() -> None:
    scores, attack = np.array([0.1, 0.9]), np.array([False, True])
    given = [{0.01: 0.5}, {0.05: 0.5}, {0.01: 0.5, 0.05: 0.5}, {}]
    rows = [measure(LabelledScores("s", "d", scores, attack, one)) for one in given]
    for shown in (rows[:1], rows[1:2], rows[2:3], rows[3:], [rows[0], rows[3]], rows):
        lines = table(shown).splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert sum("---" in line for line in lines) == 1
    assert "5% threshold" not in table(rows[:1])


def test_families() -> None:
    assert family("deepset_train") == family("deepset_test") != family("bipia_find")


def rows() -> list[dict[str, Any]]:
    return [
        {"text": f"{context} {kind}", "label": int(kind > 0), "context_id": context}
        | ({"attack_type": f"kind {kind}"} if kind else {})
        for context in range(12)
        for kind in range(6)
    ]


def test_split_shares_no_context_and_no_kind_of_attack(tmp_path: Path) -> None:
    sides = split_rows(rows())
    for key in ("context_id", "attack_type"):
        one, other = ({row[key] for row in side if key in row} for side in sides)
        assert one
        assert other
        assert not one & other
    assert all({row["label"] for row in side} == {0, 1} for side in sides)
    source = tmp_path / "all.jsonl"
    source.write_text("\n".join(map(json.dumps, rows())))
    split([str(source), "--out", str(tmp_path)])
    assert [json.loads(line) for line in (tmp_path / "bipia_held.jsonl").open()] == sides[1]


def store(folder: Path, name: str, seed: int) -> str:
    """A labelled file, and attention in which head 1-0 is drawn by attacks, as if measured."""
    rng = np.random.default_rng(seed)
    path = folder / f"{name}.jsonl"
    labels = rng.permutation(np.arange(60) % 2)
    path.write_text(
        "\n".join(
            json.dumps({"text": f"ignore {i}" * y or "a", "label": int(y)})
            for i, y in enumerate(labels)
        )
    )
    masses = rng.uniform(0.2, 0.4, (60, 2, 3, 2)).astype(np.float32)
    masses[:, 1, 0, 1] += 0.5 * labels
    texts = load_labelled_texts(path)
    model = ModelInfo("test/m", None, 2, 2, 3, 64, "float32", "cpu", "vllm")
    about = InjectionMeasurement(model, name, data_hash(texts), "Say", "hash", {})
    tokens = np.full(60, 4, np.int32)
    groups = tuple(text.group for text in texts)
    (folder / "store").mkdir(exist_ok=True)
    attention = InjectionAttention(masses, tokens, labels == 1, groups, about)
    attention.save(folder / "store" / f"{name}.safetensors")
    loaded = InjectionAttention.load(folder / "store" / f"{name}.safetensors")
    assert loaded.measurement == about
    assert loaded.groups == groups
    assert (loaded.masses == masses).all()
    return str(path)


def test_whole_run_from_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    find = [store(tmp_path, name, i) for i, name in enumerate(("a_train", "b_train"))]
    held = store(tmp_path, "a_test", 7)
    folder = tmp_path / "out"
    arguments = ["--find", *find, "--measure", held, "--store", str(tmp_path / "store")]
    arguments += ["--output", str(folder), "--top", "1", "--model", "test/m"]
    with pytest.raises(DataError, match="with instruction 'Say' instead of 'Say xxxxxx'"):
        main(arguments)
    main([*arguments, "--instruction", "Say"])
    report = json.loads((folder / "injection.json").read_text())
    by_system = {row["system"]: row for row in report["rows"]}
    assert list(by_system) == [
        "k-sigma",
        "k-sigma, left out",
        "signed",
        "signed, left out",
        "length alone",
        "keywords alone",
    ]
    assert by_system["signed, left out"]["auroc"] > 0.95
    assert by_system["length alone"]["auroc"] == 0.5
    assert by_system["keywords alone"]["auroc"] == 1.0
    assert (folder / "injection.md").read_text() == capsys.readouterr().out
    assert (folder / "injection.svg").stat().st_size > 1000
