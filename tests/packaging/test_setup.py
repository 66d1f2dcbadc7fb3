"""tools/setup.py: which engine, when it works again, and what a failure leaves behind."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module, for a scratch repository; commands are noted, not run."""
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "tools" / "setup.py")
    assert spec
    assert spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "constraints").mkdir()
    for name in ("pyproject.toml", "constraints/cpu.txt", "constraints/gpu.txt"):
        (tmp_path / name).write_text("torch==1.0\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(module, "STATE", tmp_path / ".venv" / "state.json")
    module.ran = []

    def note(command: list[str], failure: str) -> None:
        module.ran.append(" ".join(command[1:4]))
        if "venv" in command:
            module.PYTHON.parent.mkdir(parents=True, exist_ok=True)
            module.PYTHON.touch()
        if module.failing and module.failing in " ".join(command):
            raise module.SetupError(failure)

    module.failing = ""
    monkeypatch.setattr(module, "run", note)
    monkeypatch.setattr(module, "install_cpu_torch", lambda lock: module.ran.append("torch"))
    return module


def made_venv(setup: Any) -> bool:
    return any(command.startswith("-m venv --clear") for command in setup.ran)


def test_it_sets_up_once(setup: Any) -> None:
    setup.set_up("cpu")
    assert made_venv(setup)
    setup.ran.clear()
    setup.set_up("cpu")
    assert setup.ran == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints/cpu.txt"])
def test_a_changed_input_installs_again_into_the_same_venv(setup: Any, name: str) -> None:
    setup.set_up("cpu")
    setup.ran.clear()
    (setup.ROOT / name).write_text("torch==2.0\n")
    setup.set_up("cpu")
    assert setup.ran
    assert not made_venv(setup)


@pytest.mark.parametrize("key", ["python", "executable", "venv", "extra"])
def test_another_python_engine_or_place_makes_a_new_venv(setup: Any, key: str) -> None:
    setup.set_up("cpu")
    state = json.loads(setup.STATE.read_text())
    setup.STATE.write_text(json.dumps({**state, key: "another"}))
    setup.ran.clear()
    setup.set_up("cpu")
    assert made_venv(setup)


@pytest.mark.parametrize("step", ["install --no-deps -r", "-e", "-P -c"])
def test_a_failed_set_up_is_not_taken_for_a_finished_one(setup: Any, step: str) -> None:
    setup.failing = step
    with pytest.raises(setup.SetupError):
        setup.set_up("cpu")
    setup.failing = ""
    setup.ran.clear()
    setup.set_up("cpu")
    assert setup.ran
    assert not made_venv(setup)


@pytest.mark.parametrize("content", ["", "{", "[]", "3"])
def test_an_unreadable_state_starts_afresh(setup: Any, content: str) -> None:
    setup.set_up("cpu")
    setup.STATE.write_text(content)
    setup.ran.clear()
    setup.set_up("cpu")
    assert made_venv(setup)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'", True),
        ("echo 'No devices were found'", False),
        ("echo 'GPU 0: lost' >&2; exit 9", False),
        (None, False),
    ],
)
def test_a_gpu_is_one_that_nvidia_smi_lists(
    setup: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str | None,
    expected: bool,
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup.has_nvidia_gpu() is expected


def test_an_old_python_is_told_what_to_do(
    setup: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.setattr(setup, "OLDEST_PYTHON", (3, 99))
    assert setup.main() == 1
    assert "make PYTHON=" in capsys.readouterr().err
    assert setup.ran == []
