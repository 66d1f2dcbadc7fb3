"""The wheel: two top-level names, every source and data file, and importable from elsewhere."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: Where each top-level folder of the repository is installed.
FOLDERS = {
    "core_rerank": "core_rerank",
    "hook_runtime": "hook_runtime",
    "eval": "core_rerank/eval",
    "retrievers": "core_rerank/retrievers",
    "configs": "core_rerank/configs",
}
#: Folders that stay in the repository.
KEPT_BACK = {"__pycache__", "results"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The built wheel; built from a copy, so that no build folder is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns(*KEPT_BACK))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--no-index", "--wheel-dir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel was unpacked in."""
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    return folder


def test_the_top_level_holds_two_names(wheel: zipfile.ZipFile) -> None:
    info = f"core_rerank-{PYPROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in wheel.namelist()} == {
        "core_rerank",
        "hook_runtime",
        info,
    }
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    scripts = wheel.read(f"{info}/entry_points.txt").decode()
    assert "core-rerank = core_rerank.cli:main" in scripts


def test_every_source_and_data_file_is_in_it(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{installed}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, installed in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".md" and not KEPT_BACK & set(path.parts)
    }
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected - shipped == set()
    assert {name for name in shipped - expected if not name.endswith(".md")} == set()
    assert any(name.startswith("core_rerank/configs/core_rerank/") for name in shipped)


def test_every_name_imports_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import core_rerank, core_rerank.cli, core_rerank.configs, core_rerank.eval\n"
        "import core_rerank.retrievers, hook_runtime\n"
        "from importlib.resources import files\n"
        "print(len([f for f in (files('core_rerank.configs') / 'core_rerank').iterdir()]))\n"
        "print(core_rerank.__file__, core_rerank.eval.__file__, hook_runtime.__file__, sep='\\n')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(installed)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    configs, *paths = result.stdout.split()
    assert int(configs) == len(list((ROOT / "configs" / "core_rerank").glob("*.yaml")))
    assert all(Path(path).is_relative_to(installed) for path in paths)


def test_the_metadata_states_the_licence_and_every_extra(wheel: zipfile.ZipFile) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    assert metadata["Name"] == "core-rerank"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "all",
        "bm25",
        "cpu",
        "dense",
        "haystack",
        "injection",
        "langchain",
        "dev",
        "eval",
        "gpu",
        "llama-index",
        "plots",
        "ray",
        "retrieval",
        "server",
        "transformers",
    }
