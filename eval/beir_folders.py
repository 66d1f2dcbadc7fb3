"""From a collection's name or path to its BEIR folder, fetched first where it is not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from core_rerank.errors import DataError, MissingDependencyError

NAMES = (
    "arguana",
    "climate-fever",
    "cqadupstack",
    "dbpedia-entity",
    "fever",
    "fiqa",
    "hotpotqa",
    "msmarco",
    "nfcorpus",
    "nq",
    "quora",
    "scidocs",
    "scifact",
    "trec-covid",
    "webis-touche2020",
)
"""The collections that BEIR's authors publish as archives."""
_ARCHIVES = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
_FILES = "corpus.jsonl, queries.jsonl and qrels/test.tsv"


def find_collection(
    name_or_path: str | os.PathLike[str], data_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The folder itself, or the one of a BEIR collection, such as ``"scifact"``.

    Args:
        name_or_path: a folder, or one of ``NAMES``.
        data_dir: where collections are kept; the user's cache folder by default. One that is not
            there is fetched with beir's own downloader, and appears whole or not at all.

    Raises:
        DataError: neither a folder nor a name, or it could not be fetched; names the folder that
            was expected.
        MissingDependencyError: beir is not installed.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    name = os.fspath(name_or_path)
    if name not in NAMES:
        raise DataError(
            f"{name} is neither a folder nor a collection of BEIR. Give a folder with {_FILES}, "
            f"or one of {', '.join(NAMES)}."
        )
    home = _default_home() if data_dir is None else Path(data_dir)
    folder = home / name
    return folder if folder.is_dir() else _fetch(name, folder)


def _default_home() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("core-rerank", appauthor=False) / "beir"


def _fetch(name: str, folder: Path) -> Path:
    from zipfile import BadZipFile

    try:
        from beir.util import download_and_unzip
    except ImportError as error:
        raise MissingDependencyError(
            f"{folder} is missing, and fetching it needs beir ({error}). To install it: "
            "pip install 'core-rerank[eval]'."
        ) from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        try:
            fetched = Path(download_and_unzip(f"{_ARCHIVES}/{name}.zip", scratch))
            os.replace(fetched, folder)
        except (OSError, BadZipFile) as error:  # requests' errors are OSErrors
            raise DataError(
                f"BEIR's collection {name!r} could not be fetched "
                f"({type(error).__name__}: {error!s:.200}). Without a network, put its {_FILES} "
                f"into {folder}, or give the path of a folder that holds them."
            ) from None
    return folder
