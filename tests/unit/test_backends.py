"""Opening a backend by name: what it is given, what is missing, what it does not know."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_backend import FakeBackend

from core_rerank import MissingDependencyError, Reranker, backends
from core_rerank.backends import name_model, open_backend
from core_rerank.models import ResolvedModel
from hook_runtime.specs import Head

HEADS = (Head(1, 0),)
LOCAL = ResolvedModel("/models/m", "org/model", None)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What a stand-in for HookLLM is called with."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def hook_llm(model: str, **options: Any) -> FakeBackend:
        calls.append((model, options))
        return FakeBackend(None, name=options["name"])

    module = ModuleType("hook_runtime.engine")
    module.HookLLM = hook_llm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hook_runtime.engine", module)
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    return calls


def test_vllm_gets_the_heads_and_only_their_layers(opened: list[Any]) -> None:
    result = open_backend("vllm", LOCAL, HEADS, {"max_model_len": 512})
    assert opened == [
        (
            "/models/m",
            {"layers": "auto", "heads": HEADS, "name": "org/model", "max_model_len": 512},
        )
    ]
    assert result.model_id == "org/model"
    result.close()
    assert result.backend.closed  # type: ignore[attr-defined]


def test_layers_are_the_users_to_set(opened: list[Any]) -> None:
    open_backend("vllm", LOCAL, HEADS, {"layers": None})
    assert opened[0][1]["layers"] is None


def test_every_head_needs_every_layer(opened: list[Any]) -> None:
    open_backend("vllm", LOCAL, None, {})
    assert (opened[0][1]["layers"], opened[0][1]["heads"]) == (None, None)


def test_a_revision_is_passed_for_an_id_and_kept_for_a_folder(
    opened: list[Any], tmp_path: Path
) -> None:
    open_backend("vllm", ResolvedModel("org/model", "org/model", "abc"), HEADS, {})
    assert opened[0][1]["revision"] == "abc"
    result = open_backend("vllm", ResolvedModel(str(tmp_path), "org/model", "abc"), HEADS, {})
    assert "revision" not in opened[1][1]
    assert result.model.revision == "abc"


@pytest.mark.parametrize(
    ("backend", "missing", "command", "other"),
    [
        ("vllm", "vllm", "pip install 'core-rerank[gpu]'", "backend='transformers'"),
        ("transformers", "torch", "pip install 'core-rerank[transformers]'", "backend='vllm'"),
    ],
)
def test_a_missing_package_names_the_command(
    monkeypatch: pytest.MonkeyPatch, backend: str, missing: str, command: str, other: str
) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(MissingDependencyError) as caught:
        open_backend(backend, LOCAL, HEADS, {})
    assert command in str(caught.value)
    assert other in str(caught.value)
    assert isinstance(caught.value, ImportError)


def test_transformers_names_arguments_it_does_not_know(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(TypeError, match="does not know enforce_eager, gpu_memory_utilization: it"):
        Reranker(
            str(tiny_model("llama")),
            heads=["1-0"],
            backend="transformers",
            gpu_memory_utilization=0.5,
            enforce_eager=True,
        )


def test_transformers_by_name(tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("llama"))
    with Reranker(folder, heads=["1-0"], backend="transformers", dtype="float32") as reranker:
        assert reranker.model.backend == "transformers"
        assert reranker.model.layers_kept == 2
        assert reranker.model_id == folder
        ranking = reranker.rerank("one", ["two", "three"])
        assert len(ranking) == 2
        backend = reranker._open.backend
    with pytest.raises(Exception, match="closed"):
        backend.capture(
            [reranker._reader._pass(reranker._reader.builder.build("q", ["a"])).request]
        )


def test_a_failed_start_closes_the_backend(
    opened: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    started: list[FakeBackend] = []
    fake = FakeBackend(object())
    monkeypatch.setattr(
        sys.modules["hook_runtime.engine"], "HookLLM", lambda *_, **__: started.append(fake) or fake
    )
    with pytest.raises(AttributeError, match="chat_template"):
        Reranker(str(tmp_path), heads=["1-0"])
    assert started == [fake]
    assert fake.closed


def test_a_running_backend_says_what_it_runs(tiny_model: Callable[[str], Path]) -> None:
    assert name_model("ignored", FakeBackend(None)).model_id == "test/fake"
    folder = str(tiny_model("llama"))
    assert name_model("ignored", FakeBackend(None, name=folder)).path_or_id == folder


@pytest.mark.parametrize(
    ("on_cpu", "given", "dtype"),
    [(True, {}, "float32"), (False, {}, None), (True, {"dtype": "bfloat16"}, "bfloat16")],
)
def test_the_embedded_model_is_exact_on_a_cpu(
    opened: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    on_cpu: bool,
    given: dict[str, Any],
    dtype: str | None,
) -> None:
    from hook_runtime import compat

    monkeypatch.setattr(compat, "is_cpu", lambda: on_cpu)
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    open_backend("vllm", ResolvedModel("/models/s", model_id, None), HEADS, given)
    assert opened[0][1].get("dtype") == dtype
