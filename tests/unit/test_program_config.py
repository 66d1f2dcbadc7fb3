"""Configs: what they say, what is wrong with them, and what other packages add."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plugin import install_plugin, plugin_installed, write_plugin
from typer.testing import CliRunner

from core_rerank.cli import app
from hook_runtime.analyzers import AttentionMass, Projection, Reading
from hook_runtime.config import json_schema, load_config
from hook_runtime.errors import ConfigError, ProbeError
from hook_runtime.interventions import AddVector, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe, States
from hook_runtime.programs import Program
from hook_runtime.registry import find, names
from hook_runtime.specs import AttentionProbe, Capture, Head
from hook_runtime.templates import AttentionTemplate
from hook_runtime.vectors import Vector

ONES = np.ones(8, np.float32)
WHOLE = """
model: org/model
revision: abc
probes:
  - {type: attention, heads: [3-5, "15-7"], spans: [[0, 4], [5, -2]]}
  - {type: hidden_state, layers: [3, 10], positions: [3, 8]}
  - {type: head_output, heads: [3-5], reduce: mean}
interventions:
  - {type: add_vector, layers: [4], vector: vectors/x.safetensors, coefficient: 3}
  - {type: scale_heads, heads: [1-1], factor: 0, positions: generated, stop_step: 4}
analyzer: {type: projection, vector: {file: vectors/x.safetensors, name: x}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from safetensors.numpy import save_file

    (tmp_path / "vectors").mkdir()
    save_file({"x": ONES}, tmp_path / "vectors" / "x.safetensors")
    return tmp_path


def write(folder: Path, text: str, name: str = "program.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to the file, wherever the process is."""
    monkeypatch.chdir("/")
    config = load_config(write(folder, WHOLE))
    assert (config.model, config.revision) == ("org/model", "abc")
    assert config.program == Program(
        (
            HiddenStateProbe([3, 10], positions=(3, 8)),
            HeadOutputProbe(["3-5"], reduce="mean"),
        ),
        (
            AddVector([4], ONES, 3),
            ScaleHeads(["1-1"], 0, positions="generated", stop_step=4),
        ),
    )
    assert config.attention == AttentionTemplate(["3-5", "15-7"], spans=((0, 4), (5, -2)))
    assert config.analyzer == Projection(Vector(ONES))


def test_json_says_the_same(folder: Path) -> None:
    import yaml

    text = json.dumps(yaml.safe_load(WHOLE))
    assert load_config(write(folder, text, "a.json")) == load_config(write(folder, WHOLE))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("probes: []", "model: this key is needed"),
        ("model: m\nprobs: []", "probs: there is no such key"),
        (
            "model: m\nprobes: [{type: hidden_states, layers: all}]",
            r"probes\[0\]: type 'hidden_states' is not one of 'attention', 'head_output', "
            "'hidden_state'",
        ),
        ("model: m\nprobes: [{layers: all}]", r"probes\[0\]: the key 'type' is needed"),
        (
            "model: m\nprobes: [{type: hidden_state, layers: all, positions: lastt}]",
            r"probes\[0\]\.positions: .*'all', 'prompt', 'generated' or 'last'.*'lastt'",
        ),
        (
            "model: m\nprobes: [{type: hidden_state, layers: [1, x]}]",
            r"probes\[0\]\.layers\[1\]: .*integer.*'x'",
        ),
        (
            "model: m\ninterventions: [{type: scale_heads, heads: [x]}]",
            r"interventions\[0\]\.factor: this key is needed",
        ),
        (
            "model: m\ninterventions: [{type: add_vector, layers: [1], vector: v.pt}]",
            r"interventions\[0\]\.vector: vectors are read from \.safetensors files only",
        ),
        (
            "model: m\ninterventions: [{type: ablate, layers: [1], vector: v.safetensors}]",
            r"interventions\[0\]\.vector: there is no file",
        ),
        (
            "model: m\ninterventions: "
            "[{type: ablate, layers: [1], vector: {file: vectors/x.safetensors, name: y}}]",
            r"interventions\[0\]\.vector: .* holds the tensors x, and 'y' is not there",
        ),
        (
            "model: m\ninterventions: "
            "[{type: add_vector, layers: [1], vector: vectors/x.safetensors, stop_step: 0}]",
            r"interventions\[0\]: no step lies between",
        ),
        (
            "model: m\nanalyzer: {type: nope}",
            "analyzer: type 'nope' is not one of 'attention_mass'",
        ),
        (
            "model: m\nprobes: [{type: attention, heads: all}, {type: attention, heads: all}]",
            "one attention probe at most",
        ),
        ("model: 3", "model: .*string.*3"),
        ("model: m\nprobes: [{type: [x], layers: all}]", r"probes\[0\]: type .*'x'.* is not one"),
        ("model: m\nprobes: {type: attention}", "probes: .*list"),
        ("model: m\nprobes: [attention]", r"probes\[0\]: "),
        (
            'model: m\nprobes: [{type: hidden_state, layers: ["1"]}]',
            r"probes\[0\]\.layers\[0\]: .*integer.*'1'",
        ),
        (
            "model: m\nprobes: [{type: hidden_state, layers: [1.0]}]",
            r"probes\[0\]\.layers\[0\]: .*integer.*1\.0",
        ),
        (
            'model: m\nprobes: [{type: hidden_state, layers: [1], positions: ["3", 8]}]',
            r"probes\[0\]\.positions.*: .*integer.*'3'",
        ),
        (
            'model: m\ninterventions: [{type: scale_heads, heads: [1-1], factor: "0"}]',
            r"interventions\[0\]\.factor: .*number.*'0'",
        ),
        (
            "model: m\nprobes: [{type: attention, heads: all, sum_heads: 1}]",
            r"probes\[0\]\.sum_heads: .*boolean.*1",
        ),
        (
            "model: m\nanalyzer: {type: attention_mass, normalize: 'yes'}",
            r"analyzer\.normalize: .*boolean.*'yes'",
        ),
        (
            "model: m\nprobes: [{type: attention, heads: all, query: [9, 3]}]",
            r"probes\[0\]: query \(9, 3\) is not a half-open token span",
        ),
        (
            "model: m\nprobes: [{type: attention, heads: all, spans: [[0, 4], [2, 6]]}]",
            r"probes\[0\]: spans must ascend without overlap",
        ),
        ("model: [", "not valid YAML"),
        ("- model", "the whole file"),
    ],
)
def test_errors_name_file_key_and_what_is_allowed(folder: Path, text: str, says: str) -> None:
    path = write(folder, text)
    with pytest.raises(ConfigError, match=says) as raised:
        load_config(path)
    assert str(path) in str(raised.value)


def test_files_that_are_no_configs(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.yaml"):
        load_config(write(folder, WHOLE, "program.toml"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(folder / "none.yaml")


def test_the_schema_names_every_kind() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    for group in ("probes", "interventions", "analyzers"):
        for name in names(group):  # type: ignore[arg-type]
            assert f'"const": "{name}"' in text
    assert schema["required"] == ["model"]
    assert schema["additionalProperties"] is False


def test_another_packages_kinds(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = """
model: m
probes: [{type: stream_norm, layers: all, positions: all}]
interventions: [{type: shrink, layers: [2], factor: 0.25}]
analyzer: {type: largest}
"""
    path = write(folder, text)
    with pytest.raises(ConfigError, match="'stream_norm' is not one of"):
        load_config(path)
    with plugin_installed(install_plugin(tmp_path_factory.mktemp("plugin"))):
        config = load_config(path)
        (shrink,) = config.program.interventions
        assert (shrink.kind, shrink.factor) == ("shrink", 0.25)  # type: ignore[attr-defined]
        assert Program.from_wire(config.program.wire, {}) == config.program
        assert '"const": "shrink"' in json.dumps(json_schema())
    with pytest.raises(ProbeError, match="there is no intervention 'shrink'; there are ablate, "):
        find("interventions", "shrink")


CLASSES = """
import dataclasses
from hook_runtime.analyzers import Analyzer
from hook_runtime.interventions import StreamIntervention
from hook_runtime.probes import HiddenStateProbe

@dataclasses.dataclass(frozen=True)
class Own(%s):
    kind = "own"
    weights: tuple[float, ...] = dataclasses.field(default_factory=lambda: (1.0, 2.0), kw_only=True)

class Plain(%s):
    kind = "own"

class Other(Own):
    kind = "other"

@dataclasses.dataclass(frozen=True)
class Odd(Own):
    odd: dataclasses.Field = dataclasses.field(default=None, kw_only=True)

@dataclasses.dataclass(frozen=True)
class Refusing(Own):
    def __post_init__(self):
        raise KeyError("weights")

def function():
    return None
"""
BASES = {
    "probes": "HiddenStateProbe",
    "interventions": "StreamIntervention",
    "analyzers": "Analyzer",
}
USES = {
    "probes": "probes: [{type: own, layers: [1]}]",
    "interventions": "interventions: [{type: own, layers: [1]}]",
    "analyzers": "analyzer: {type: own}",
}


@pytest.mark.parametrize("group", BASES)
@pytest.mark.parametrize(
    ("code", "found", "says"),
    [
        ("import no_such_module", "Own", "cannot be loaded: ModuleNotFoundError"),
        ("1 / 0", "Own", "cannot be loaded: ZeroDivisionError"),
        ("", "Own", "cannot be loaded: AttributeError"),
        (None, "function", "must be a class that derives from"),
        (None, "dataclasses", "must be a class that derives from"),
        (None, "Other", "its kind is 'other'"),
    ],
)
def test_a_broken_package_breaks_only_configs_that_name_it(
    folder: Path, group: str, code: str | None, found: str, says: str
) -> None:
    base = BASES[group]
    site = folder / "site"
    site.mkdir()
    text = CLASSES % (base, base) if code is None else code
    write_plugin(site, "broken", text, {f"{group}.own": found})
    with plugin_installed(site):
        assert load_config(write(folder, WHOLE)).model == "org/model"
        using = write(folder, f"model: m\n{USES[group]}")
        where = rf"the entry point 'own' of hook_runtime\.{group} \(broken:{found}\).*{says}"
        with pytest.raises(ConfigError, match=rf"{using}: {where}"):
            load_config(using)
        with pytest.raises(ProbeError, match=where):
            json_schema()
        done = CliRunner().invoke(app, ["config", "schema"])
        assert done.exit_code == 1
        assert f"broken:{found}" in done.output


@pytest.mark.parametrize("group", BASES)
@pytest.mark.parametrize(
    ("found", "says"),
    [
        ("Odd", r"'own' \(sound:Odd\) has fields that no config can hold: .*Field"),
        ("Refusing", r"(probes\[0\]|interventions\[0\]|analyzer): KeyError: 'weights'"),
    ],
)
def test_a_class_that_cannot_be_made(folder: Path, group: str, found: str, says: str) -> None:
    site = folder / "site"
    site.mkdir()
    write_plugin(site, "sound", CLASSES % (BASES[group], BASES[group]), {f"{group}.own": found})
    with plugin_installed(site), pytest.raises(ConfigError, match=says):
        load_config(write(folder, f"model: m\n{USES[group]}"))


@pytest.mark.parametrize("group", BASES)
def test_defaults_that_are_made(folder: Path, group: str) -> None:
    site = folder / "site"
    site.mkdir()
    write_plugin(site, "sound", CLASSES % (BASES[group], BASES[group]), {f"{group}.own": "Own"})
    with plugin_installed(site):
        config = load_config(write(folder, f"model: m\n{USES[group]}"))
        (made,) = (*config.program.probes, *config.program.interventions) or (config.analyzer,)
        assert made.weights == (1.0, 2.0)  # type: ignore[union-attr]
        unknown = write(folder, f"model: m\n{USES[group].replace('own', 'owm')}")
        with pytest.raises(ConfigError, match=r"'owm' is not one of .*'own'"):
            load_config(unknown)


# ---------------------------------------------------------------- the built-in analyzers


def reading(**how: Any) -> Reading:
    given: dict[str, Any] = {"attention": None, "probe": None, "states": ()}
    return Reading("r", (1, 2, 3, 4, 5, 6), (7,), **{**given, **how})


@pytest.mark.parametrize("reduction", ["tokens", "documents"])
def test_attention_mass(reduction: Any) -> None:
    probe = AttentionProbe(["0-0", "0-1"], (5, 6), ((0, 2), (3, 4)), reduction)
    tokens = np.array([[0.1, 0.2, 0.5], [0.3, 0.2, 0.1]], np.float32)
    values = tokens if reduction == "tokens" else np.array([[0.3, 0.5], [0.5, 0.1]], np.float32)
    read = reading(attention=Capture((Head(0, 0), Head(0, 1)), values), probe=probe)
    assert AttentionMass().analyze(read)["spans"] == pytest.approx([0.4, 0.3])
    assert AttentionMass(normalize=True).analyze(read)["spans"] == pytest.approx([4 / 7, 3 / 7])
    with pytest.raises(ProbeError, match="needs an attention probe"):
        AttentionMass().analyze(reading())


def test_projection() -> None:
    values = np.array([[[3, 4], [6, 8]]], np.float32)
    states = States(HiddenStateProbe([2], positions=(1, 3)), (1, 3), values)
    found = Projection(Vector([0, 2])).analyze(reading(states=(states,)))
    assert found == {"layers": [2], "positions": [1, 3], "values": [[4, 8]]}
    with pytest.raises(ProbeError, match="there is no probe 1"):
        Projection(Vector([0, 2]), probe=1).analyze(reading(states=(states,)))
    with pytest.raises(ProbeError, match="vector has 3 numbers, but probe 0 read 2"):
        Projection(Vector([0, 2, 1])).analyze(reading(states=(states,)))


@pytest.mark.parametrize("width", [0, 2])
def test_projection_of_nothing(width: int) -> None:
    """Nothing was generated: no worker knows how wide it would have been."""
    nothing = np.zeros((1, 0, width), np.float32)
    states = States(HiddenStateProbe([2], positions="generated"), (6, 6), nothing)
    with pytest.raises(ProbeError, match=r"probe 0 \('generated'\) read no token"):
        Projection(Vector([0, 2])).analyze(reading(states=(states,)))


# ---------------------------------------------------------------- the command


def test_the_command_line(folder: Path) -> None:
    cli = CliRunner()
    right = write(folder, WHOLE)
    wrong = write(folder, "model: m\nprobs: []", "wrong.yaml")
    done = cli.invoke(app, ["config", "validate", str(right)])
    assert done.exit_code == 0
    assert "org/model, probes: 3, interventions: 2, analyzer: projection" in done.output
    done = cli.invoke(app, ["config", "validate", str(wrong), str(right)])
    assert done.exit_code == 1
    assert "wrong.yaml: probs: there is no such key" in done.output
    done = cli.invoke(app, ["config", "schema"])
    assert json.loads(done.output) == json_schema()
