"""Fixtures shared by all tests: the embedded model and tiny random checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hook_runtime import TransformersBackend


def processors() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Two processes, each with engines; one where there is one processor, or a GPU to share."""
    from setup import has_nvidia_gpu

    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    return 2 if len(processors()) > 1 and not has_nvidia_gpu() else 0


def pytest_configure() -> None:
    """Give each of several test processes (``pytest -n``) processors of its own.

    Engines size their thread pools by what they may use: on shared processors each would wait for
    the others' threads in every operation.
    """
    name, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if name is None or count is None or not hasattr(os, "sched_setaffinity"):
        return
    own = processors()[int(name.removeprefix("gw")) :: int(count)]
    if own:
        os.sched_setaffinity(0, own)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Folder of the embedded default model, fetched into the user's cache on first use."""
    from core_rerank.models import resolve_model

    return Path(resolve_model("smollm2-135m-instruct").path_or_id)


@pytest.fixture(scope="session")
def tiny_model(
    smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Function from an architecture's name to its tiny random checkpoint (see tiny_models)."""
    from tiny_models import make_tiny

    folder = tmp_path_factory.getbasetemp() / "tiny-models"
    return lambda arch: make_tiny(arch, folder, smollm2_dir)


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_dir: Path) -> Any:
    """The embedded model's tokenizer, without the model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture(scope="session")
def transformers_backend(smollm2_dir: Path) -> Iterator[TransformersBackend]:
    """The embedded model on plain transformers in float32: slow, use few short documents."""
    from hook_runtime import TransformersBackend

    backend = TransformersBackend(
        str(smollm2_dir), name="HuggingFaceTB/SmolLM2-135M-Instruct", device="cpu"
    )
    yield backend
    backend.close()
