"""A `Reranker` on a backend without a model, for tests of what stands above the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from fake_backend import FakeBackend, Make
from tokenizer_families import FAMILIES

if TYPE_CHECKING:
    from core_rerank import Reranker


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level tokenizer."""
    return FAMILIES["byte-level"]()


@pytest.fixture
def backend(tokenizer: Any) -> FakeBackend:
    """A backend without a model."""
    return FakeBackend(tokenizer)


@pytest.fixture
def make(backend: FakeBackend) -> Make:
    """Function from settings to a pointwise `Reranker` with two heads on ``backend``."""
    from core_rerank import Reranker

    def make(**settings: Any) -> Reranker:
        settings = {"backend": backend, "heads": ["1-2", "0-1"], "window": 1} | settings
        return Reranker(**settings)

    return make


@pytest.fixture(scope="module")
def reranker(smollm2_tokenizer: Any) -> Reranker:
    """A pointwise `Reranker` to put behind the service or an adapter, one a file."""
    from services import fake_reranker  # needs the server extra

    return fake_reranker(smollm2_tokenizer)[0]
