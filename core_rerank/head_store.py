"""A folder that keeps measured attention, one checked file a query, so that a run can go on.

    manifest.json                    what was measured, by which model, with which settings
    00000-3f0c....safetensors        query 0; the name holds a keyed hash of the content
    00001-91ab....safetensors        query 1

A file appears whole or not at all, and its hash is keyed by the manifest and the query's number: a
file that was cut, changed, renamed or copied from another store is noticed when it is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hook_runtime.specs import ModelInfo

from .errors import DataError
from .files import PARTIAL, write_whole
from .head_attention import HeadAttention, Measurement, QueryAttention

MANIFEST = "manifest.json"
FORMAT = 1
_SUFFIX = ".safetensors"


@dataclass(frozen=True)
class AttentionStore:
    """Measured attention on disk.

    Attributes:
        folder: where it is.
        measurement: what was, or is being, measured.
        documents: how many each query has.
    """

    folder: Path
    measurement: Measurement
    documents: tuple[int, ...]

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> AttentionStore:
        """The store in ``folder``; DataError if there is none or its manifest is damaged."""
        folder = Path(folder)
        path = folder / MANIFEST
        if not path.is_file():
            raise DataError(
                f"{folder} holds no measured attention ({MANIFEST} is missing): give the folder "
                "that `core-rerank detect-heads --store` wrote, or --data to measure some."
            )
        try:
            content = json.loads(path.read_bytes())
            if content.pop("hash") != _digest(content) or content["format"] != FORMAT:
                raise ValueError("its hash or its format is another")
            about = content["measurement"]
            measurement = Measurement(
                **{
                    **about,
                    "model": ModelInfo(**about["model"]),
                    "query_ids": tuple(about["query_ids"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path} is damaged, or was written by another release of core-rerank ({error}): "
                "delete the folder and measure again."
            ) from None
        return cls(folder, measurement, tuple(content["documents"]))

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        measurement: Measurement,
        documents: Sequence[int],
    ) -> AttentionStore:
        """A store for ``measurement`` in ``folder``: the one there, to be gone on with, or new.

        Raises:
            DataError: the store there was made from other inputs; names what differs.
        """
        folder = Path(folder)
        store = cls(folder, measurement, tuple(documents))
        if (folder / MANIFEST).exists():
            there = cls.open(folder)
            there.check(store._inputs())
            return there
        if folder.is_dir() and any(folder.glob(f"*{_SUFFIX}")):
            raise DataError(
                f"{folder} holds {_SUFFIX} files but no {MANIFEST}: they are not, or no longer, "
                "a store. Give another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
        content = store._content()
        text = json.dumps({**content, "hash": _digest(content)}, indent=1)
        write_whole(folder / MANIFEST, f"{text}\n")
        return store

    def check(self, inputs: Mapping[str, object]) -> None:
        """DataError unless every one of ``inputs`` (see ``Measurement``) is what this is made from.

        ``model`` stands for the model's id. The name of the data does not count; its hash does.
        """
        mine = self._inputs()
        differing = [name for name, value in inputs.items() if mine[name] != value]
        if differing:
            told = "; ".join(
                f"{name} was {mine[name]!r:.200}, now {inputs[name]!r:.200}" for name in differing
            )
            raise DataError(
                f"the store {self.folder} was made from other inputs: {told}. Give the inputs it "
                "was made from, or another folder."
            )

    def missing(self) -> list[int]:
        """Numbers of the queries that are not measured yet."""
        there = self._files()
        return [row for row in range(len(self.documents)) if row not in there]

    def put(self, row: int, attention: QueryAttention) -> None:
        """Keep query ``row``'s attention."""
        import numpy as np
        from safetensors.numpy import save

        arrays = {
            "query": attention.query,
            "tokens": attention.tokens,
            "positive": attention.positive,
        }
        if attention.null is not None:
            arrays["null"] = attention.null
        # safetensors writes an array's memory as it lies, a view's with what lies between.
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        write_whole(self.folder / f"{row:05d}-{self._hash(row, content)}{_SUFFIX}", content)

    def get(self, row: int) -> QueryAttention:
        """Query ``row``'s attention; DataError if its file is missing or damaged."""
        from safetensors.numpy import load

        path = self._files().get(row)
        if path is None:
            raise DataError(f"{self.folder} holds nothing for query {row}: measure it first.")
        return self._read(row, path, load)

    def load(self) -> HeadAttention:
        """Everything, in memory: 4 bytes a query, document, layer, head and pass.

        Raises:
            DataError: a query is not measured yet, or a file is damaged.
        """
        from safetensors.numpy import load

        missing = self.missing()
        if missing:
            raise DataError(
                f"{self.folder} holds {len(self.documents) - len(missing)} of "
                f"{len(self.documents)} queries: measure the rest by the command that began it "
                "(with --data)."
            )
        files = self._files()
        every = (self._read(row, files[row], load) for row in range(len(self.documents)))
        return HeadAttention.of(every, max(self.documents), self.measurement, self.digest())

    def digest(self) -> str:
        """A hash of the inputs and of every file there is."""
        names = [path.name for _, path in sorted(self._files().items())]
        return _digest([self._key, names])

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep other processes from measuring into the store; clears what a killed one left."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise DataError(
                f"another process is measuring into {self.folder}: wait for it, or give another "
                "folder."
            ) from None
        try:
            for partial in self.folder.glob(f"*{PARTIAL}"):
                partial.unlink()
            yield
        finally:
            lock.release()

    def _read(self, row: int, path: Path, load: Any) -> QueryAttention:
        content = path.read_bytes()
        if path.name != f"{row:05d}-{self._hash(row, content)}{_SUFFIX}":
            raise DataError(
                f"{path} is damaged, or is not of this store: its content does not have the hash "
                "in its name. Delete it and run the command that measured it again; only that "
                "query is measured again."
            )
        arrays = load(content)
        return QueryAttention(
            arrays["query"], arrays.get("null"), arrays["tokens"], arrays["positive"]
        )

    def _files(self) -> dict[int, Path]:
        files: dict[int, Path] = {}
        for path in sorted(self.folder.glob(f"*{_SUFFIX}")):
            number = path.name.partition("-")[0]
            row = int(number) if number.isdecimal() else -1
            if not 0 <= row < len(self.documents) or row in files:
                raise DataError(
                    f"{path} does not belong into the store, or its query is there twice: delete "
                    "it, and measure again if a query is then missing."
                )
            files[row] = path
        return files

    def _inputs(self) -> dict[str, object]:
        """What must be the same for numbers to belong together."""
        about = asdict(self.measurement)
        model = about.pop("model")
        del about["data"]
        shape = {k: v for k, v in model.items() if k not in ("name", "revision")}
        return {
            "model": model["name"],
            "revision": model["revision"],
            **shape,
            **about,
            "documents": self.documents,
        }

    def _content(self) -> dict[str, Any]:
        """The manifest but for its hash, as JSON gives it back."""
        about = asdict(self.measurement)
        about["query_ids"] = list(about["query_ids"])
        return {"format": FORMAT, "measurement": about, "documents": list(self.documents)}

    def _hash(self, row: int, content: bytes) -> str:
        key = f"{row} {self._key}".encode()
        return blake2b(content, digest_size=16, key=key).hexdigest()

    @cached_property
    def _key(self) -> str:
        return _digest(self._content())


def _digest(value: object) -> str:
    """A hash of what JSON can say."""
    text = json.dumps(value, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()
