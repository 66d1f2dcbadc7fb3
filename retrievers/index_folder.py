"""Writes an index folder whole or not at all, and reads only one that is as it was written.

A folder holds the retriever's files and ``index.json``: format, kind, settings, model, the corpus's
fingerprint, package versions, size and SHA-256 of every file, and a checksum of all that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core_rerank.errors import IndexFolderError

from .corpus import Corpus, Fingerprint, fingerprint

FORMAT = 1
MANIFEST = "index.json"
DOC_IDS = "doc_ids.json"
_AGAIN = "Index the corpus again."


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an index folder says of itself.

    Attributes:
        kind: the retriever's name, such as ``"bm25"``.
        settings: what decides its rankings besides the corpus.
        corpus: what it was built from.
        model: the embedding model's id, revision and hash; None without a model.
        versions: packages that built it.
        files: path in the folder -> ``{"bytes": size, "sha256": hash}``.
    """

    kind: str
    settings: Mapping[str, Any]
    corpus: Fingerprint
    versions: Mapping[str, str]
    model: Mapping[str, Any] | None = None
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def write_index(folder: str | Path, manifest: Manifest, write: Callable[[Path], None]) -> None:
    """Have ``write`` fill a new folder beside ``folder``, add the manifest, and rename.

    An index that is already there is replaced; it stays whole until the new one is. A process
    that is killed meanwhile leaves a hidden folder beside it, which may be deleted.

    Raises:
        IndexFolderError: something that is not an index is there.
    """
    folder = Path(folder)
    _refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        new = made / "new"
        new.mkdir()
        write(new)
        content = {"format": FORMAT, **asdict(manifest), "files": _checksums(new)}
        text = json.dumps({**content, "checksum": _checksum(content)}, indent=1)
        with (new / MANIFEST).open("x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        _exchange(new, folder, made / "old")
    finally:
        shutil.rmtree(made, ignore_errors=True)


def read_index(
    folder: str | Path, kind: str, settings: Mapping[str, Any], corpus: Corpus | None = None
) -> Manifest:
    """The manifest, after comparing every file with it, and ``corpus`` too, if given.

    Raises:
        IndexFolderError: the folder is missing, half-written, altered, of a newer format, of
            another kind or of other ``settings``; or the index was built from another corpus.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, kind)
    if manifest.settings != json.loads(json.dumps(settings)):
        raise IndexFolderError(
            f"{folder} was built with {_brief(manifest.settings)}, not {_brief(settings)}: ask for "
            "the same settings, or index into another folder."
        )
    _check_files(folder, manifest)
    if corpus is not None:
        check_corpus(folder, manifest.corpus, fingerprint(corpus))
    return manifest


def read_manifest(folder: str | Path, kind: str | None = None) -> Manifest:
    """The manifest alone, checked against its own checksum; of that ``kind``, if given.

    Raises:
        IndexFolderError: it is missing, damaged, altered, of a newer format or of another kind.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not path.is_file():
        raise IndexFolderError(
            f"{folder} is there, but {MANIFEST} is not: it is no index, or one half-written. "
            + _AGAIN
            if folder.is_dir()
            else f"{folder} is missing: expected the folder of an index. Give the one that "
            "`core-rerank index` or a retriever's save(folder) wrote, or index the corpus first."
        )
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise IndexFolderError(f"{path} is damaged: {error}. {_AGAIN}") from None
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise IndexFolderError(f"{path} is not the manifest of an index. {_AGAIN}")
    if content["format"] > FORMAT:
        raise IndexFolderError(
            f"{folder} has format {content['format']}; this version of core-rerank reads up to "
            f"{FORMAT}. Upgrade core-rerank, or index the corpus again."
        )
    if content.pop("checksum", None) != _checksum(content):
        raise IndexFolderError(f"{path} was altered after it was written. {_AGAIN}")
    del content["format"]
    manifest = Manifest(**{**content, "corpus": Fingerprint(**content["corpus"])})
    if kind not in (None, manifest.kind):
        raise IndexFolderError(
            f"{folder} is an index of kind {manifest.kind!r}, not {kind!r}: "
            "open it with core_rerank.retrievers.load_retriever."
        )
    return manifest


def write_ids(folder: Path, doc_ids: list[str]) -> None:
    """Keep the documents' ids, in the order of the index's rows."""
    (folder / DOC_IDS).write_text(json.dumps(doc_ids), encoding="ascii")


def read_ids(folder: str | Path) -> list[str]:
    """What ``write_ids`` kept."""
    return json.loads((Path(folder) / DOC_IDS).read_bytes())


def check_corpus(folder: Path, built_from: Fingerprint, given: Fingerprint) -> None:
    """Raise IndexFolderError unless the two are the same corpus."""
    if built_from == given:
        return
    difference = (
        f"{built_from.documents} documents, not {given.documents}"
        if built_from.documents != given.documents
        else f"as many documents ({given.documents}), but other ids, titles, texts or order"
    )
    raise IndexFolderError(
        f"{folder} was built from another corpus ({difference}). "
        "Give the corpus it was built from, or index this one into another folder."
    )


def is_index(folder: str | Path) -> bool:
    """Whether there is a manifest, of any format; nothing is checked."""
    return (Path(folder) / MANIFEST).is_file()


def _exchange(new: Path, folder: Path, old: Path) -> None:
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise


def _brief(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists() or is_index(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise IndexFolderError(
            f"{folder} exists and is not an index: it is not overwritten. Name another folder."
        )


def _checksums(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": file_hash(path),
        }
        for path in files
    }


def _check_files(folder: Path, manifest: Manifest) -> None:
    there = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } - {MANIFEST}
    if there != set(manifest.files):
        missing, added = set(manifest.files) - there, there - set(manifest.files)
        what = f"{min(missing)} is missing" if missing else f"{min(added)} does not belong there"
        raise IndexFolderError(f"{folder} is not as it was written: {what}. {_AGAIN}")
    for name, expected in manifest.files.items():
        path = folder / name
        if path.stat().st_size != expected["bytes"] or file_hash(path) != expected["sha256"]:
            raise IndexFolderError(f"{path} is not as it was written: damaged or altered. {_AGAIN}")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, read piece by piece, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
