"""Fixtures shared by all tests: the embedded model and tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


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
