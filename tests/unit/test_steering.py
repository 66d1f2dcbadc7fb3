"""Steering vectors: what they are of planted states, their programs, their files, the command."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from core_rerank import SteeringVector
from core_rerank.cli import app
from core_rerank.commands.steering_data import read_lines, read_pairs
from core_rerank.errors import DataError
from core_rerank.steering import instruction_pairs
from hook_runtime.config import load_config
from hook_runtime.interventions import AddVector, ProjectTo
from hook_runtime.probes import HiddenStateProbe, States
from hook_runtime.programs import Program
from hook_runtime.specs import ModelInfo

HIDDEN, LAYERS, PLANTED = 16, 6, 3
DIRECTION = np.random.default_rng(1).standard_normal(HIDDEN)
PROMPTS = [f"question {i}" for i in range(20)]
ASK = "Answer loudly."


class PlantedLLM:
    """States are noise; "loudly" in a prompt shifts those of every layer, the planted one most."""

    def __init__(self) -> None:
        self.model = ModelInfo("org/m", "abc", LAYERS, LAYERS, 2, 512, "float32", "cpu", "vllm")
        self.tokenizer = SimpleNamespace(apply_chat_template=self._written)
        self.batches: list[int] = []

    def _written(self, messages: Any, **_: Any) -> str:
        return " ".join(message["content"] for message in messages)

    def perform(self, prompts: Any, program: Program, params: Any) -> list[Any]:
        (probe,) = program.probes
        assert isinstance(probe, HiddenStateProbe)
        self.batches.append(len(prompts))
        return [
            SimpleNamespace(
                reading=SimpleNamespace(states=(States(probe, (0, 1), self._states(p, probe)),))
            )
            for p in prompts
        ]

    def _states(self, prompt: Any, probe: Any) -> np.ndarray:
        text = prompt if isinstance(prompt, str) else prompt["prompt_token_ids"][0]
        noise = np.random.default_rng(len(text) + sum(map(ord, text)))
        rows = []
        for state in probe.layers:
            size = 3.0 if state == PLANTED + 1 else 0.5
            rows.append(noise.standard_normal(HIDDEN) + size * ("loudly" in text) * DIRECTION)
        return np.array(rows, np.float32)[:, None]

    def chat(self, messages: Any, params: Any, *, steer: Any, use_tqdm: bool) -> list[Any]:
        return [
            self._answer(m[0]["content"], s, params) for m, s in zip(messages, steer, strict=True)
        ]

    def generate(self, prompts: Any, params: Any, *, steer: Any, use_tqdm: bool) -> list[Any]:
        return [self._answer(p, s, params) for p, s in zip(prompts, steer, strict=True)]

    def _answer(self, prompt: str, steer: Program | None, params: Any) -> Any:
        how = "plain"
        if steer is not None:
            item: Any = steer.interventions[0]
            how = f"{item.kind} {item.layers} {getattr(item, 'coefficient', 'target')}"
        return SimpleNamespace(outputs=[SimpleNamespace(text=f"{prompt}: {how}\x1b[31m")])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> PlantedLLM:
    def encode(text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [text]}

    made = PlantedLLM()
    encode.apply_chat_template = made._written  # type: ignore[attr-defined]
    made.tokenizer = encode  # type: ignore[assignment]
    monkeypatch.setattr("hook_runtime.exchange.one_token", lambda: None)
    monkeypatch.setattr("hook_runtime.compat.symbol", lambda *_: lambda **how: how)
    return made


def fitted(llm: Any, **how: Any) -> SteeringVector:
    return SteeringVector.fit(llm, *instruction_pairs(PROMPTS, ASK), **how)


def test_the_planted_direction_is_found(llm: PlantedLLM) -> None:
    vector = fitted(llm)
    assert (vector.model, vector.revision, vector.pairs) == ("org/m", "abc", 20)
    assert vector.layers == (0, 1, 2, 3, 4)  # the norm follows the last one
    assert vector.layer == PLANTED
    np.testing.assert_allclose(vector.direction, 3 * DIRECTION, atol=1.0)
    assert vector.separation.argmax() == PLANTED
    unit = vector.direction / np.linalg.norm(vector.direction)
    np.testing.assert_allclose(vector.targets[PLANTED], 3 * DIRECTION @ unit, atol=1.0)


def test_pairs_that_do_not_differ_are_not_separated(llm: PlantedLLM) -> None:
    """Judged on the pairs that were fitted, noise alone would look separated."""
    other = [f"another {i}" for i in range(20)]
    vector = SteeringVector.fit(llm, PROMPTS, other)
    assert np.abs(vector.separation).max() < 1.5
    assert fitted(llm).separation[PLANTED] > 5


def test_many_prompts_go_in_several_batches(llm: PlantedLLM) -> None:
    prompts = [f"q {i}" for i in range(70)]
    SteeringVector.fit(llm, *instruction_pairs(prompts, ASK), layers=[2])
    assert llm.batches == [64, 64, 12]


def test_its_programs(llm: PlantedLLM) -> None:
    vector = fitted(llm, layers=[4, 1])
    assert vector.layers == (1, 4)
    (added,) = vector.at(1).scaled(4, positions="generated").interventions
    assert isinstance(added, AddVector)
    assert (added.layers, added.coefficient, added.positions) == ((1,), 4.0, "generated")
    np.testing.assert_array_equal(added.vector.values, vector.directions[0])
    (brought,) = vector.at(4).projected().interventions
    assert isinstance(brought, ProjectTo)
    assert brought.layers == (4,)
    assert brought.target == pytest.approx(float(vector.targets[1]))


@pytest.mark.parametrize("coefficient", [2.5, None])
def test_a_saved_vector_is_a_program_and_comes_back(
    llm: PlantedLLM, tmp_path: Path, coefficient: float | None
) -> None:
    vector = fitted(llm).at(2)
    config = vector.save(tmp_path / "loud", coefficient, positions="generated")
    found = load_config(config)
    assert (found.model, found.revision) == ("org/m", "abc")
    how = {"positions": "generated"}
    wanted = vector.projected(**how) if coefficient is None else vector.scaled(coefficient, **how)
    assert found.program == wanted
    again = SteeringVector.load(tmp_path / "loud")
    assert (again.layer, again.layers, again.pairs) == (2, vector.layers, 20)
    for name in ("directions", "targets", "separation"):
        np.testing.assert_array_equal(getattr(again, name), getattr(vector, name))
    assert sorted(p.name for p in config.parent.iterdir()) == [
        "program.yaml",
        "steering.safetensors",
    ]


@pytest.mark.parametrize(
    ("positive", "negative", "how", "message"),
    [
        (["a"] * 3, ["b"] * 2, {}, "3 positive but 2 negative"),
        (["a"], ["b"], {}, "1 pairs are too few"),
        ("ab", ["a", "b"], {}, "positive must be a list"),
        (["a"] * 3, ["b"] * 3, {"layers": [5]}, "layer 5 cannot be read: there are 0 to 4"),
        (["a"] * 3, ["b"] * 3, {"positions": "somewhere"}, "positions 'somewhere'"),
    ],
)
def test_what_cannot_be_fitted(
    llm: PlantedLLM, positive: Any, negative: Any, how: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        SteeringVector.fit(llm, positive, negative, **how)


def test_a_layer_that_was_not_read_and_words_that_are_missing(llm: PlantedLLM) -> None:
    with pytest.raises(ValueError, match="layer 9 was not read"):
        fitted(llm).at(9)
    with pytest.raises(ValueError, match="instruction is empty"):
        instruction_pairs(PROMPTS, " ")


def test_what_is_no_steering_vector(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    with pytest.raises(DataError, match=r"holds no steering\.safetensors"):
        SteeringVector.load(tmp_path)
    path = tmp_path / "steering.safetensors"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="is damaged"):
        SteeringVector.load(tmp_path)
    save_file({"x": np.ones(3, np.float32)}, path)
    with pytest.raises(DataError, match="no steering vector of this release"):
        SteeringVector.load(tmp_path)
    save_file({"x": np.ones(3)}, path, {"format": "core-rerank steering 1", "about": "{}"})
    with pytest.raises(DataError, match="lacks 'layers'"):
        SteeringVector.load(tmp_path)


# ---------------------------------------------------------------- the command


@pytest.fixture
def steer(llm: PlantedLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command in ``tmp_path``, where prompts.txt lies; counts the models it starts."""

    def open_backend(_: str, resolved: Any, heads: Any, options: Any) -> Any:
        started.append(resolved.model_id)
        assert options["enforce_eager"]
        return SimpleNamespace(backend=llm, close=lambda: started.append("closed"))

    started: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("core_rerank.backends.open_backend", open_backend)
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS), encoding="utf-8")

    def run(*arguments: str) -> Any:
        result = CliRunner().invoke(app, ["steer", *arguments])
        result.started = started  # type: ignore[attr-defined]
        return result

    return run


FIT = ("fit", "--instruction", ASK, "--prompts", "prompts.txt", "-o", "loud", "-m", "org/m")


def test_fit_then_run_side_by_side(steer: Callable[..., Any], tmp_path: Path) -> None:
    result = steer(*FIT, "-c", "2")
    assert result.exit_code == 0, result.output
    assert "20 pairs, 5 layers" in result.stdout
    assert result.started == ["org/m", "closed"]
    assert load_config(tmp_path / "loud" / "program.yaml").program.interventions
    assert (tmp_path / "loud" / "separation.png").read_bytes().startswith(b"\x89PNG")
    table = steer("run", "loud", "-p", "who is there?", "-c", "1", "-c", "4", "--project")
    assert table.exit_code == 0, table.output
    for column in ("without", "coefficient 1", "coefficient 4", "projected"):
        assert column in table.stdout
    assert "\x1b[31m" not in table.stdout
    found = json.loads(steer("run", "loud", "--prompts", "prompts.txt", "--json").stdout)
    assert (found["model"], found["layer"]) == ("org/m", PLANTED)
    assert [row["prompt"] for row in found["prompts"]] == PROMPTS
    assert found["prompts"][0]["answers"] == {
        "without": "question 0: plain\x1b[31m",
        "coefficient 1": f"question 0: add_vector ({PLANTED},) 1.0\x1b[31m",
    }


def test_pairs_from_a_file_and_another_layer(steer: Callable[..., Any], tmp_path: Path) -> None:
    rows = [
        {"positive": [{"role": "user", "content": f"{p} loudly"}], "negative": p} for p in PROMPTS
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "pairs.jsonl").write_text(text, encoding="utf-8")
    result = steer("fit", "--pairs", "pairs.jsonl", "-o", "loud", "-m", "org/m", "--layer", "1")
    assert result.exit_code == 0, result.output
    assert SteeringVector.load(tmp_path / "loud").layer == 1
    shown = steer("run", "loud", "-p", "x", "--layer", "2", "--json", "--raw")
    (row,) = json.loads(shown.stdout)["prompts"]
    assert row["answers"]["coefficient 1"].startswith("x: add_vector (2,)")


def test_a_line_ends_at_its_newline_only(steer: Callable[..., Any], tmp_path: Path) -> None:
    mark = "a\u2028b\x85c"
    rows = [{"positive": f"{p} loudly {mark}", "negative": f"{p} {mark}"} for p in PROMPTS]
    text = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "pairs.jsonl").write_text(text, encoding="utf-8", newline="")
    found = read_pairs(tmp_path / "pairs.jsonl", raw=True)
    assert found.negative == [f"{p} {mark}" for p in PROMPTS]
    (tmp_path / "marks.txt").write_text(f"{mark}\r\n\n {mark} \n", encoding="utf-8", newline="")
    assert read_lines(tmp_path / "marks.txt") == [mark, mark]


def test_the_folder_may_be_the_one_we_are_in(steer: Callable[..., Any], tmp_path: Path) -> None:
    result = steer(*FIT, "-o", ".")
    assert result.exit_code == 0, result.output
    assert SteeringVector.load(tmp_path).layer == PLANTED


def test_a_layer_that_cannot_be_steered_is_told_before_prompts_are_read(
    steer: Callable[..., Any], llm: PlantedLLM
) -> None:
    result = steer(*FIT, "--layer", str(LAYERS - 1))
    assert result.exit_code == 2
    assert "layer 5 cannot be read: there are 0 to 4" in " ".join(result.stderr.split())
    assert llm.batches == []


def test_the_model_that_answered_is_named(steer: Callable[..., Any], llm: PlantedLLM) -> None:
    assert steer(*FIT).exit_code == 0
    llm.model = replace(llm.model, name="org/other")
    again = ("run", "loud", "-p", "x", "-m", "org/other")
    assert json.loads(steer(*again, "--json").stdout)["model"] == "org/other"
    assert "of org/other, by a vector of org/m" in " ".join(steer(*again).stdout.split())


def test_no_file_holds_a_coefficient_that_no_engine_loads(llm: PlantedLLM, tmp_path: Path) -> None:
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="finite number"):
            fitted(llm).save(tmp_path / "x", value)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fit", "-o", "x"), "give --pairs JSONL, or --instruction TEXT"),
        ((*FIT, "--pairs", "prompts.txt"), "not both"),
        (("fit", "--pairs", "prompts.txt", "-o", "x"), "prompts.txt, line 1 is not JSON"),
        (("fit", "--pairs", "half.jsonl", "-o", "x"), 'line 1: "negative" must be text or a list'),
        ((*FIT[:6], "prompts.txt"), "it is a file"),
        ((*FIT[:6], "no/such/folder"), "does not exist"),
        (("fit", "--pairs", "empty.jsonl", "-o", "x"), "holds no pairs"),
        ((*FIT, "--coefficient", "nan"), "--coefficient must be a finite number"),
        ((*FIT, "--instruction", " "), "the instruction is empty"),
        ((*FIT, "--instruction", "", "--raw"), "the instruction is empty"),
        (("run", ".", "-p", "x"), "holds no steering.safetensors"),
    ],
)
def test_mistakes_are_told_before_an_engine_starts(
    steer: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    (tmp_path / "half.jsonl").write_text('{"positive": "a"}', encoding="utf-8")
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    result = steer(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert result.started == []
