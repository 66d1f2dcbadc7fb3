"""Injection heads as files, how they are found, and where the threshold goes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_rerank import Head, InjectionHeads
from core_rerank.errors import DataError, HeadSetError
from core_rerank.injection_data import LabelledText, load_labelled_texts, sampled
from core_rerank.injection_finding import Evidence, find_heads, held_out_scores
from core_rerank.injection_heads import packaged_injection_heads
from core_rerank.injection_scoring import focus, suspicion, threshold_for

TEXT = """
model: org/model
num_layers: 4
num_heads: 3
heads: [1-2, 0-1]
weights: [1.5, -2.0]
intercept: -0.25
threshold: 0.625
method: signed
"""


def evidence(benign: int = 40, attacks: int = 40, seed: int = 0) -> Evidence:
    """Noise in twelve heads, but for head 1-2, which attacks draw, and 2-0, which they push."""
    rng = np.random.default_rng(seed)
    attack = np.arange(benign + attacks) >= benign
    drawn = np.clip(rng.normal(0.5, 0.05, (len(attack), 12)), 0, 1)
    drawn[:, 5] += 0.12 * attack
    drawn[:, 6] -= 0.10 * attack
    groups = [str(i) for i in range(len(attack))]
    return Evidence.of([(drawn, attack, groups)], num_heads=3)


def test_focus_and_score_by_hand() -> None:
    shares = focus(np.array([[0.3, 0.1], [0.1, 0.4]]))
    assert shares == pytest.approx([0.75, 0.2])
    assert suspicion(shares) == pytest.approx(1 - (0.75 + 0.2) / 2)
    assert suspicion(shares, [2.0, -1.0], 0.1) == pytest.approx(
        1 / (1 + np.exp(-(0.1 + 2 * 0.25 - 0.8)))
    )
    assert suspicion(shares, [1e6, 1e6]) == pytest.approx(1.0)


@pytest.mark.parametrize("fpr", [0.0, 0.01, 0.05, 0.29, 0.5])
def test_threshold_keeps_the_rate_and_is_the_lowest_that_does(fpr: float) -> None:
    scores = np.random.default_rng(1).permutation(100) / 100
    threshold = threshold_for(scores, fpr)
    assert (scores > threshold).mean() == pytest.approx(fpr)


def test_threshold_with_few_or_equal_scores() -> None:
    assert threshold_for(np.array([0.2, 0.4]), 0.01) == 0.4
    assert (np.full(9, 0.3) > threshold_for(np.full(9, 0.3), 0.2)).mean() == 0
    with pytest.raises(ValueError, match="no benign scores"):
        threshold_for(np.array([]), 0.01)
    with pytest.raises(ValueError, match="fpr"):
        threshold_for(np.ones(3), 1.0)


def test_separation_is_the_papers_rule_solved_for_k() -> None:
    found = evidence()
    apart = found.separation()
    benign, attack = found.drawn[~found.attack], found.drawn[found.attack]
    for head in range(12):
        normal, attacked = 1 - benign[:, head], 1 - attack[:, head]
        for k in (0.2, 0.9, 1.1):
            margin = (normal.mean() - k * normal.std()) - (attacked.mean() + k * attacked.std())
            assert (margin > 0) == (apart[head] > k)


def test_k_sigma_takes_the_heads_beyond_k_or_the_best() -> None:
    found = find_heads(evidence(), "k-sigma", k=0.8)
    assert found.heads == (Head(1, 2),)
    assert found.by_rule
    assert found.weights is None
    few = find_heads(evidence(), "k-sigma", k=4.0, count=2)
    assert few.heads[0] == Head(1, 2)
    assert len(few.heads) == 2
    assert not few.by_rule
    assert few.k is not None
    assert few.k < 4.0


def test_signed_takes_both_directions_and_scores_better() -> None:
    pytest.importorskip("sklearn")
    from core_rerank.injection_finding import auroc

    seen, unseen = evidence(), evidence(seed=5)
    found = find_heads(seen, "signed", count=2)
    assert found.weights is not None
    signs = {head: weight > 0 for head, weight in zip(found.heads, found.weights, strict=True)}
    assert signs == {Head(1, 2): True, Head(2, 0): False}
    plain = find_heads(seen, "k-sigma", count=1)
    scores = [f.scores(unseen.drawn, 3) for f in (found, plain)]
    assert auroc(scores[0], unseen.attack) > auroc(scores[1], unseen.attack) > 0.9
    assert 0.4 < scores[0].mean() < 0.6


def test_held_out_scores_of_noise_tell_nothing() -> None:
    pytest.importorskip("sklearn")
    from core_rerank.injection_finding import auroc

    noise = evidence()
    rng = np.random.default_rng(3)
    noise = Evidence(rng.random((80, 12)), noise.attack, noise.sets, noise.groups, noise.num_heads)
    seen = find_heads(noise, "signed", count=12).scores(noise.drawn, 3)
    held_out = held_out_scores(noise, "signed", count=12)
    assert auroc(seen, noise.attack) > 0.65
    assert auroc(held_out, noise.attack) < 0.65


def test_separation_is_of_data_sets_with_both_kinds() -> None:
    both = evidence()
    calm = np.full((30, 12), 0.5)
    parts = [(both.drawn, both.attack, both.groups), (calm, np.zeros(30, bool), ["c"] * 30)]
    assert Evidence.of(parts, 3).separation() == pytest.approx(both.separation())
    halves = (slice(0, 40), slice(40, 80))
    apart = [(both.drawn[rows], both.attack[rows], both.groups[rows]) for rows in halves]
    with pytest.raises(DataError, match="no data set has both"):
        find_heads(Evidence.of(apart, 3), "k-sigma")


@pytest.mark.parametrize(
    ("kind", "rows"), [("attacks", slice(40, 80)), ("benign texts", slice(0, 40))]
)
def test_one_kind_in_one_context_cannot_be_held_out(kind: str, rows: slice) -> None:
    pytest.importorskip("sklearn")
    given = evidence()
    groups = list(given.groups)
    groups[rows] = ["one context"] * 40
    with pytest.raises(DataError, match=f"the {kind} are of 1 context, and two"):
        held_out_scores(replace(given, groups=tuple(groups)), "k-sigma")
    groups[rows] = [f"context {i % 2}" for i in range(40)]
    scores = held_out_scores(replace(given, groups=tuple(groups)), "k-sigma")
    assert np.isfinite(scores).all()


def test_few_texts_cannot_be_held_out() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(DataError, match="9 texts are too few"):
        held_out_scores(evidence(benign=5, attacks=4), "k-sigma")
    assert np.isfinite(held_out_scores(evidence(benign=5, attacks=5), "k-sigma")).all()


def test_finding_refuses() -> None:
    with pytest.raises(ValueError, match="both benign and attacking"):
        find_heads(evidence(attacks=0), "k-sigma")
    with pytest.raises(ValueError, match="method must be one of"):
        find_heads(evidence(), "magic")


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "heads.yaml"
    path.write_text(TEXT)
    heads = InjectionHeads.from_yaml(path)
    assert heads.heads == (Head(1, 2), Head(0, 1))
    heads.to_yaml(tmp_path / "again.yaml")
    assert InjectionHeads.from_yaml(tmp_path / "again.yaml") == heads


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.625", "1.5", "threshold"),
        ("[1-2, 0-1]", "[1-3, 0-1]", "heads names 1-3"),
        ("[1-2, 0-1]", "[1-2, 1-2]", "named twice"),
        ("[1.5, -2.0]", "[1.5]", "weights has 1"),
        ("[1.5, -2.0]", "null", "intercept belongs to weights"),
        ("method", "metod", "metod"),
        ("num_layers: 4", "num_layers: '4'", "num_layers"),
    ],
)
def test_file_errors_name_file_and_key(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "heads.yaml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(HeadSetError, match=said) as raised:
        InjectionHeads.from_yaml(path)
    assert "heads.yaml" in str(raised.value)


def test_packaged_files_say_where_they_are_from() -> None:
    packaged = packaged_injection_heads()
    assert {heads.task for heads in packaged} == {"instruction", "document"}
    names = [(heads.model, heads.task) for heads in packaged if heads.default]
    assert len(set(names)) == len(names)
    for heads in packaged:
        assert heads.source
        published = heads.method == "attention-tracker"
        assert published == (not heads.found_with)
        assert not published or "set one on your own benign data" in heads.notes


def row(**changes: Any) -> str:
    import json

    return json.dumps({"text": "a", "label": 1} | changes)


def test_labelled_texts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([row(), row(id="b", label=0, instruction="Do", context_id=7)]))
    first, second = load_labelled_texts(path)
    assert first == LabelledText("line 1", "a", True, None, "line 1")
    assert second == LabelledText("b", "a", False, "Do", "7")
    path.write_text(row(label="yes"))
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: 'label' must be 1"):
        load_labelled_texts(path)
    with pytest.raises(DataError, match="is missing"):
        load_labelled_texts(tmp_path / "none.jsonl")


def test_sampling_keeps_groups_whole() -> None:
    texts = [LabelledText(str(i), "t", i % 4 > 0, None, str(i // 4)) for i in range(40)]
    some = sampled(texts, 18, seed=1)
    assert len(some) == 16
    assert all(sum(t.group == text.group for t in some) == 4 for text in some)
    assert sampled(texts, 18, seed=1) == some != sampled(texts, 18, seed=2)
    assert sampled(texts, None) is texts
    size = min(Counter(text.group for text in texts).values())
    assert len(sampled(texts, size)) == size
    with pytest.raises(DataError, match=f"a limit of {size - 1} texts .*, which has {size}:"):
        sampled(texts, size - 1)
