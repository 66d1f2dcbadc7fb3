"""What a compiled model's name in vLLM's cache depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")

from hook_runtime import compat, compile_cache
from hook_runtime.compile_cache import name_compiled_model


class Users:
    """Stands for a worker that a user wrote."""


def name(worker: type = object) -> Any:
    config = SimpleNamespace(additional_config={"own": 1})
    given = config.additional_config
    name_compiled_model(config, worker)
    assert given == {"own": 1}
    assert config.additional_config["own"] == 1
    return config.additional_config[compat.COMPILED_MODEL]


def test_it_depends_on_the_processor_the_package_and_the_users_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    names = {name(), name(Users)}
    assert name() in names
    with monkeypatch.context() as patched:
        patched.setattr("torch.backends.cpu.get_cpu_capability", lambda: "another's")
        patched.setattr(compat, "is_cpu", lambda: True)
        names.add(name())
    (tmp_path / "loader.py").write_text("changed = True\n")
    monkeypatch.setattr(compile_cache, "__file__", str(tmp_path / "compile_cache.py"))
    names.add(name())
    assert len(names) == 4


def test_a_config_that_cannot_hold_it_is_left_as_it_is() -> None:
    own = object()
    config = SimpleNamespace(additional_config=own)
    name_compiled_model(config, Users)
    assert config.additional_config is own
