"""Head sets: files, the packaged lists, and refusal for another model."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from tokenizer_families import FAMILIES

from core_rerank import Reranker
from core_rerank.errors import HeadSetError
from core_rerank.heads import HeadSet, find_head_set, packaged_head_sets
from hook_runtime.errors import ProbeError
from hook_runtime.specs import Head, ModelInfo

MINIMAL = """\
model: org/model
num_layers: 4
num_heads: 2
method: core
heads: ["3-1", "0-0"]
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "heads.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def model(**changes: Any) -> ModelInfo:
    fields = {
        "name": "org/model",
        "revision": None,
        "num_layers": 4,
        "layers_kept": 4,
        "num_heads": 2,
        "max_model_len": 100,
        "dtype": "float32",
        "device": "cpu",
        "backend": "test",
    }
    return ModelInfo(**(fields | changes))


def test_a_minimal_file(tmp_path: Path) -> None:
    head_set = HeadSet.from_yaml(write(tmp_path, MINIMAL))
    assert head_set == HeadSet("org/model", 4, 2, (Head(3, 1), Head(0, 0)), "core")
    assert (head_set.window, head_set.scale, head_set.default) == ("all", "model", True)


def test_every_key_survives_a_round_trip(tmp_path: Path) -> None:
    head_set = HeadSet(
        model="org/model",
        num_layers=30,
        num_heads=9,
        heads=(Head(10, 3), Head(12, 11 - 3)),
        method="core",
        revision="0123456",
        aliases=("short", "other/name"),
        default=False,
        window=1,
        calibrate=False,
        temperature=0.01,
        scale="1/sqrt(head_dim)",
        data="some queries: 100",
        source="found by us",
        notes="日本語, a 'quote' and a\nline",
        scores=(0.5, 0.25),
        weights=(1.5, -0.5),
        found_with={"seed": "0", "vllm": "0.32"},
    )
    path = tmp_path / "heads.yaml"
    head_set.to_yaml(path)
    assert HeadSet.from_yaml(path) == head_set
    assert [file.name for file in tmp_path.iterdir()] == ["heads.yaml"]


def test_writing_replaces_a_file_or_leaves_it_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "old")
    HeadSet.from_yaml(write(tmp_path, MINIMAL)).to_yaml(path)
    assert "org/model" in path.read_text()
    with pytest.raises(FileNotFoundError):
        HeadSet.from_yaml(path).to_yaml(tmp_path / "missing" / "heads.yaml")
    assert [file.name for file in tmp_path.iterdir()] == ["heads.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold keys and values, not list"),
        ("", "must hold keys and values, not NoneType"),
        ("model: [", "is not valid YAML"),
        (MINIMAL + "colour: red\n", "unknown key 'colour'; the keys are model, num_layers"),
        (MINIMAL.replace("model: org/model\n", ""), "key 'model' is missing"),
        (MINIMAL.replace("method: core\n", ""), "key 'method' is missing"),
        (MINIMAL.replace("org/model", "3"), "'model' must be a Hugging Face id, not 3"),
        (MINIMAL.replace(": 4", ": 0"), "'num_layers' must be a whole number from 1, not 0"),
        (MINIMAL.replace(": 4", ": true"), "'num_layers' must be a whole number from 1, not True"),
        (MINIMAL.replace('"3-1"', '"3.1"'), "'heads' must be a list of heads.*not a head: '3.1'"),
        (MINIMAL.replace('["3-1", "0-0"]', "3-1"), "'heads' must be a list of heads"),
        (MINIMAL.replace('"3-1", "0-0"', ""), "'heads' must be a list of heads"),
        (MINIMAL.replace("0-0", "3-1"), "'heads' names a head twice: 3-1 3-1"),
        (MINIMAL.replace("0-0", "4-0"), "'heads' names 4-0, but 'num_layers' is 4"),
        (MINIMAL.replace("0-0", "0-2"), "'heads' names 0-2, but .*'num_heads' is 2"),
        (MINIMAL + "window: none\n", "'window' must be 'all' or a whole number from 1"),
        (MINIMAL + "window: 0\n", "'window' must be 'all' or a whole number from 1"),
        (MINIMAL + "temperature: hot\n", "'temperature' must be a number or null, not 'hot'"),
        (MINIMAL + "revision: 123\n", "'revision' must be a commit, in quotes, or null, not 123"),
        (MINIMAL + "aliases: short\n", "'aliases' must be a list of names"),
        (MINIMAL + "default: 1\n", "'default' must be true or false"),
        (MINIMAL + "scores: [1.0]\n", "'scores' has 1 numbers for 2 heads"),
        (MINIMAL + "weights: [1.0]\n", "'weights' has 1 numbers for 2 heads"),
        (MINIMAL + "weights: [1.0, 0.0]\n", "'weights' must be a list of numbers other than 0"),
        (MINIMAL + "weights: [1.0, .inf]\n", "'weights' must be a list of numbers other than 0"),
        (MINIMAL + "weights: [1.0, .nan]\n", "'weights' must be a list of numbers other than 0"),
        (MINIMAL + "weights: 2\n", "'weights' must be a list of numbers other than 0"),
        (MINIMAL + "found_with: {seed: 0}\n", "'found_with' must be texts by name"),
        (MINIMAL + "notes: !!python/object/apply:os.getcwd []\n", "is not valid YAML"),
    ],
)
def test_errors_name_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(HeadSetError, match=message) as caught:
        HeadSet.from_yaml(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        HeadSet.from_yaml(tmp_path / "none.yaml")


def test_packaged_head_sets_have_one_default_a_model() -> None:
    sets = packaged_head_sets()
    assert len(sets) >= 11
    names = Counter(n.casefold() for s in sets if s.default for n in {s.model, *s.aliases})
    assert set(names.values()) == {1}
    assert {s.model for s in sets} == {s.model for s in sets if s.default}
    assert all(s.source and s.data for s in sets)


@pytest.mark.parametrize(
    ("model_id", "method", "first", "count"),
    [
        ("ibm-granite/granite-3.2-8b-instruct", "core", "19-1", 8),
        ("meta-llama/Llama-3.1-8B-Instruct", "core", "13-18", 8),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "core", "13-18", 8),
        ("META-LLAMA/llama-3.1-8b-instruct", "core", "13-18", 8),
        ("mistralai/Mistral-7B-Instruct-v0.2", "core", "15-21", 8),
        ("microsoft/phi-4", "core", "17-1", 8),
        ("meta-llama/Llama-3.2-1B-Instruct", "qrhead", "8-21", 16),
        ("meta-llama/Llama-3.2-3B-Instruct", "qrhead", "13-16", 16),
        ("Qwen/Qwen2.5-7B-Instruct", "qrhead", "16-19", 16),
        ("meta-llama/Llama-3.1-70B-Instruct", "qrhead", "31-32", 32),
    ],
)
def test_published_head_sets(model_id: str, method: str, first: str, count: int) -> None:
    head_set = find_head_set(model_id)
    assert head_set is not None
    assert (head_set.method, len(head_set.heads)) == (method, count)
    assert head_set.heads[0] == Head.parse(first)


def test_neighbouring_models_have_none() -> None:
    for model_id in ("mistralai/Mistral-7B-Instruct-v0.3", "ibm-granite/granite-3.1-2b-instruct"):
        assert find_head_set(model_id) is None


def test_the_granite_list_says_what_scale_it_was_found_with() -> None:
    head_set = find_head_set("ibm-granite/granite-3.2-8b-instruct")
    assert head_set is not None
    assert head_set.scale == "1/sqrt(head_dim)"


def test_check_accepts_the_model(tmp_path: Path) -> None:
    head_set = HeadSet.from_yaml(write(tmp_path, MINIMAL + "aliases: [short]\n"))
    for name in ("org/model", "Org/Model", "short"):
        head_set.check(model(), name)


def test_check_refuses_another_model(tmp_path: Path) -> None:
    head_set = HeadSet.from_yaml(write(tmp_path, MINIMAL))
    with pytest.raises(HeadSetError, match="for org/model, not for org/model2: heads found on one"):
        head_set.check(model(), "org/model2")
    with pytest.raises(HeadSetError, match="has 5 layers of 2"):
        head_set.check(model(num_layers=5), "org/model")
    with pytest.raises(HeadSetError, match="has 4 layers of 3"):
        head_set.check(model(num_heads=3), "org/model")
    with pytest.raises(ProbeError, match="head 3-1 lies beyond the 3 layers kept"):
        head_set.check(model(layers_kept=3), "org/model")


def test_a_local_folder_of_the_same_shape_or_another_revision_gives_a_warning(
    tmp_path: Path,
) -> None:
    head_set = HeadSet.from_yaml(write(tmp_path, MINIMAL + "revision: aaa\n"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head_set.check_model_id(str(tmp_path))
        head_set.check(model(revision="aaa"), "org/model")
        head_set.check(model(), "org/model")
        with pytest.raises(HeadSetError, match="layers"):
            head_set.check(model(num_layers=5), str(tmp_path))
    with pytest.warns(UserWarning, match="on revision aaa, but revision bbb is loaded"):
        head_set.check(model(revision="bbb"), "org/model")
    with pytest.warns(UserWarning, match=f"the model in {tmp_path} for org/model, whose heads"):
        head_set.check(model(), str(tmp_path))


def test_the_warning_points_at_the_line_that_makes_the_reranker(tmp_path: Path) -> None:
    head_set = HeadSet.from_yaml(write(tmp_path, MINIMAL))
    (tmp_path / "config.json").write_text("{}")
    backend = FakeBackend(FAMILIES["byte-level"](), name=str(tmp_path), layers=4, heads=2)
    with pytest.warns(UserWarning, match="taking the model in") as caught:
        Reranker(backend=backend, heads=head_set)
    assert [warning.filename for warning in caught] == [__file__]
