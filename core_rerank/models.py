"""Find the model a user names: an alias, a local folder or a Hugging Face id."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from .embedded import (
    EMBEDDED_MODELS,
    MARKER_NAME,
    SMOLLM2,
    build_embedded,
    embedded_folder,
    find_damage,
    read_marker,
)
from .errors import ModelError

__all__ = [
    "KnownModel",
    "ResolvedModel",
    "build_embedded",
    "known_models",
    "resolve_model",
]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model ready to be loaded.

    Attributes:
        path_or_id: what vLLM and transformers load: a local folder or a Hugging Face id.
        model_id: the id head sets are looked up by; the folder's path where nothing else is known.
        revision: the exact weights, or None where unknown.
    """

    path_or_id: str
    model_id: str
    revision: str | None


@dataclass(frozen=True, slots=True)
class KnownModel:
    """An alias, and the folder it is unpacked in (``cached`` False: not there or incomplete)."""

    alias: str
    model_id: str
    revision: str
    license: str
    cached: bool
    path: Path


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    progress: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ResolvedModel:
    """Turn an alias, a local folder or a Hugging Face id into something that can be loaded.

    Args:
        name_or_path: an alias of ``known_models()``, which is fetched and unpacked when it is not
            in the cache; a folder with a ``config.json``; or a Hugging Face id, passed through.
        progress: show the fetching and unpacking on stderr.
        cache_dir: where embedded models are kept; the user's cache folder by default.

    Raises:
        ModelError: no such folder, a file, not an id, or the embedded model could not be fetched.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(
            f"model must be an alias, a Hugging Face id or a folder, not "
            f"{type(name_or_path).__name__}."
        )
    name = os.fspath(name_or_path)
    if name in EMBEDDED_MODELS and isinstance(name_or_path, str):
        model = EMBEDDED_MODELS[name]
        folder = build_embedded(alias=name, progress=progress, cache_dir=cache_dir)
        return ResolvedModel(str(folder), model.model_id, model.revision)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _resolve_folder(path)
    if not isinstance(name_or_path, str) or not _HUB_ID.fullmatch(name) or path.is_file():
        raise ModelError(_not_a_folder(name, path))
    close = difflib.get_close_matches(name.lower(), EMBEDDED_MODELS, n=1, cutoff=0.8)
    if "/" not in name and close:
        raise ModelError(f"unknown model {name!r}: did you mean {close[0]!r}?")
    return ResolvedModel(name, name, None)


def _not_a_folder(name: str, path: Path) -> str:
    if path.is_file():
        return f"model {name!r} is a file; give the folder that holds config.json and the weights."
    return (
        f"model {name!r} is neither an existing folder nor a Hugging Face id. Give a folder that "
        f"holds config.json and the weights, an id such as {SMOLLM2.model_id!r}, or one of: "
        f"{', '.join(EMBEDDED_MODELS)}."
    )


def _resolve_folder(path: Path) -> ResolvedModel:
    """A local folder; its id comes from our marker, its place in the hub cache, or its path."""
    path = Path(os.path.abspath(path))
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path} holds no config.json: a model folder holds config.json, the tokenizer and "
            "safetensors weights, as `save_pretrained` writes them."
        )
    if (path / MARKER_NAME).exists():
        marker = read_marker(path)
        if marker is None:
            raise ModelError(
                f"{path / MARKER_NAME} is damaged, or written by another release of core-rerank: "
                "copy the folder again, or delete that file to use the folder as it is."
            )
        return ResolvedModel(str(path), marker["model_id"], marker["revision"])
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        model_id = path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        return ResolvedModel(str(path), model_id, path.name)
    return ResolvedModel(str(path), str(path), None)


def known_models(*, cache_dir: str | os.PathLike[str] | None = None) -> list[KnownModel]:
    """The aliases, each with whether it is unpacked (judged by file sizes, so quickly)."""
    known = []
    for model in EMBEDDED_MODELS.values():
        folder = embedded_folder(model, cache_dir)
        cached = find_damage(folder, model, hashes=False) is None
        known.append(
            KnownModel(model.alias, model.model_id, model.revision, model.license, cached, folder)
        )
    return known
