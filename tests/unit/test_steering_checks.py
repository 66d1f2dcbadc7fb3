"""Steering's evaluation: what has a form and what has not, and the page of figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from core_rerank.errors import DataError
from core_rerank.eval.files import digest
from core_rerank.eval.steering import (
    CONDITIONS,
    PROMPTS,
    RESULTS,
    SHOTS,
    Answer,
    demonstrations,
    measured_before,
    settings_of,
    trial_settings,
    wilson,
)
from core_rerank.eval.steering_checks import CONSTRAINTS, is_readable
from core_rerank.eval.steering_report import draw, markdown

BY_NAME = {constraint.name: constraint for constraint in CONSTRAINTS}
TEXT = "A glacier is a river of ice, and a slow one. It moves slowly! Why? Because it is heavy."


@pytest.mark.parametrize(
    ("name", "holding", "failing"),
    [
        ("lower-case", ["it is 4 km of ice."], ["It is ice.", "4 + 4", "iPhone and all that"]),
        ("capitals", ["IT IS 4 KM OF ICE."], ["IT is ICE", "", "4"]),
        ("one-sentence", ["It is a river of ice."], ["It is ice. It moves.", "It is\nice.", ""]),
        (
            "json",
            ['{"a": "it is ice"}', '["ice"]', '```json\n{"a": 1}\n```', '```\n{"a": 1}```'],
            ["ice", '"ice"', "4", '{"a": "it', 'Here: {"a": 1}', '```json\n{"a": 1}\n``` so'],
        ),
        ("bullets", ["- it\n- is", "1. it\n2. is\n", "* it\n\n* is"], ["- it", "So:\n- it\n- is"]),
        (
            "exclamation",
            ["It is 3.5 km! It mo", "Ice!", "1. Ice!\n2. Snow!"],
            ["Ice! It moves.", "Ice", "Ice? No!", 'Ice! He said "it is."', "Ice!\n**Cold.**"],
        ),
        ("no-commas", ["It is ice. It moves."], ["Ice, that is."]),
    ],
)
def test_forms(name: str, holding: list[str], failing: list[str]) -> None:
    assert all(BY_NAME[name].holds(text) for text in holding)
    assert not any(BY_NAME[name].holds(text) for text in failing)


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda c: c.name)
def test_a_rewritten_answer_has_the_form(constraint: Any) -> None:
    assert constraint.followed(constraint.rewrite(TEXT), cut=False)
    assert not constraint.followed(TEXT, cut=False)
    assert constraint.followed(constraint.rewrite(TEXT), cut=True) is not constraint.whole


def test_loops_and_empty_answers_are_no_success() -> None:
    for text in ("", "ice", "the ice the ice the ice the ice", "-1 -1 -1 -1 -1 -1"):
        assert not is_readable(text)
        assert not BY_NAME["lower-case"].followed(text, cut=False)
    assert is_readable("the ice is a river of ice")


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda c: c.name)
def test_an_empty_answer_demonstrates_nothing(constraint: Any) -> None:
    prompts = [f"what is {i}?" for i in range(40)]
    own = [Answer(f"It is {i}. So it is.", (), False) for i in range(40)]
    positive, negative = demonstrations(constraint, prompts, own)
    assert len(positive) == len(negative) == 40
    assert [turn["content"] for turn in negative[0]] == [
        *(f"what is {SHOTS[0]}?", "It is 7. So it is."),
        *(f"what is {SHOTS[1]}?", "It is 19. So it is."),
        "what is 0?",
    ]
    assert constraint.holds(positive[0][1]["content"])
    own[20] = Answer(" \n", (), False)
    positive, negative = demonstrations(constraint, prompts, own)
    left = [prompts[i] for i in range(40) if i not in (20 - SHOTS[0], 20 - SHOTS[1])]
    for side in (positive, negative):
        assert [conversation[-1]["content"] for conversation in side] == left


def test_no_prompt_is_in_two_splits() -> None:
    prompts = json.loads(Path(PROMPTS).read_text(encoding="utf-8"))
    every = [prompt for texts in prompts.values() for prompt in texts]
    assert {split: len(texts) for split, texts in prompts.items()} == {
        "fit": 40,
        "development": 10,
        "test": 30,
    }
    assert len(set(every)) == len(every)
    assert max(SHOTS) < len(prompts["fit"])


def test_wilsons_interval() -> None:
    assert wilson(15, 30) == pytest.approx((0.3315, 0.6685), abs=1e-4)
    assert wilson(0, 30) == pytest.approx((0.0, 0.1135), abs=1e-4)


def test_what_was_measured_otherwise_is_not_kept(tmp_path: Path) -> None:
    prompts = {"fit": ["a", "b"]}
    path = tmp_path / "steering.json"
    new = measured_before(path, "org/m", prompts, ["json"])
    assert new == {"model": "org/m", "prompts_hash": digest(prompts), "constraints": {}}
    tried = [{**asdict(setting), "followed": 0.0} for setting in trial_settings()]
    new["constraints"] = {"json": {"development": tried}, "bullets": {"development": tried[1:]}}
    path.write_text(json.dumps(new), encoding="utf-8")
    assert measured_before(path, "org/m", prompts, ["bullets"]) == new
    with pytest.raises(DataError, match=r"bullets in .* was chosen from 15 settings .* the 16"):
        measured_before(path, "org/m", prompts, ["json"])
    with pytest.raises(DataError, match="has model 'org/m', and now it is 'org/n'"):
        measured_before(path, "org/n", prompts, ["bullets"])
    with pytest.raises(DataError, match="has prompts_hash"):
        measured_before(path, "org/m", {"fit": ["a", "c"]}, ["bullets"])


def test_the_stored_page_is_of_the_stored_figures_and_prompts() -> None:
    found = json.loads((RESULTS / "steering.json").read_text(encoding="utf-8"))
    assert found["prompts_hash"] == digest(json.loads(PROMPTS.read_text(encoding="utf-8")))
    assert (RESULTS / "steering.md").read_text(encoding="utf-8") == markdown(found)
    for one in found["constraints"].values():
        assert one["setting"] in settings_of(one)


def test_the_page_and_its_picture(tmp_path: Path) -> None:
    condition = {
        "followed": 0.5,
        "interval": [0.33, 0.67],
        "readable": 1.0,
        "perplexity": 7.25,
        "example": "a | b",
    }
    setting = {"contrast": "instruction", "layer": 14, "coefficient": None}
    conditions = dict.fromkeys(CONDITIONS, condition)
    few = [{**setting, "layer": n, "followed": 0.5} for n in (13, 14)]
    few.append({**few[1], "coefficient": 0.5})
    one = {"setting": setting, "conditions": conditions, "development": few[:2]}
    other = {**one, "development": few}
    found = {
        "model": "org/m",
        "prompts": {"fit": 40, "development": 10, "test": 30},
        "constraints": {"json": one, "bullets": one, "capitals": other},
    }
    page = markdown(found)
    rate = "0.50 (0.33 to 0.67)"
    assert f"| json | {' | '.join([rate] * 4)} | instruction, layer 14, projected |" in page
    assert "7.2 (1.00)" in page
    assert "- json, bullets: 2 settings (instruction, layers 13, 14, each projected)\n" in page
    assert "- capitals: 3 settings (instruction, layers 13, 14, each projected, coeff" in page
    assert r"a \| b" in page
    assert draw(found, tmp_path / "steering.png")
    assert (tmp_path / "steering.png").stat().st_size > 5000
