"""Directions in the residual stream: checked once, known by their content, carried as bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .errors import ProbeError


class Vector:
    """One direction, float32 [hidden], or one a layer, float32 [layers, hidden].

    Equal content makes equal vectors. ``digest`` names the content.
    """

    __slots__ = ("digest", "values")

    def __init__(self, values: Any) -> None:
        """``values``: a numpy array, a torch tensor, or (nested) lists of numbers."""
        if hasattr(values, "detach"):
            values = values.detach().float().cpu().numpy()
        try:
            array = np.array(values, np.float32, order="C")
        except (TypeError, ValueError) as error:
            raise ProbeError(f"not a vector of numbers: {error}.") from error
        if array.ndim not in (1, 2) or 0 in array.shape:
            raise ProbeError(
                f"a vector has shape [hidden], or [layers, hidden] for one a layer, "
                f"not {list(array.shape)}."
            )
        if not np.isfinite(array).all():
            raise ProbeError("the vector holds numbers that are not finite.")
        array.setflags(write=False)
        self.values = array
        content = str(array.shape).encode() + array.tobytes()
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

    @classmethod
    def of(cls, value: Any) -> Vector:
        """``value`` itself where it is a vector, else a vector of its numbers."""
        return value if isinstance(value, cls) else cls(value)

    @classmethod
    def load(cls, path: str | Path, name: str | None = None) -> Vector:
        """The tensor ``name`` of a safetensors file; its only one where no name is given.

        Raises:
            ProbeError: the file is missing or no safetensors file, or it has no such tensor.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            found = load_file(path)
        except FileNotFoundError as error:
            raise ProbeError(f"there is no file {path}.") from error
        except (SafetensorError, OSError) as error:
            raise ProbeError(
                f"{path} is not a safetensors file ({error}); vectors are read from no other kind."
            ) from error
        if name is None and len(found) == 1:
            return cls(next(iter(found.values())))
        if name not in found:
            names = ", ".join(sorted(found)) or "none"
            given = "no name was given" if name is None else f"{name!r} is not there"
            raise ProbeError(f"{path} holds the tensors {names}, and {given}.")
        return cls(found[name])

    @classmethod
    def load_all(cls, content: bytes) -> dict[str, Vector]:
        """Every tensor of the content of a safetensors file, by name; ProbeError if it is none."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            found = load(content)
        except (SafetensorError, ValueError, KeyError) as error:
            raise ProbeError(f"this is not the content of a safetensors file: {error}.") from error
        return {name: cls(tensor) for name, tensor in found.items()}

    @property
    def width(self) -> int:
        """Numbers a layer: the model's hidden size."""
        return int(self.values.shape[-1])

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    def to_wire(self) -> dict[str, Any]:
        """Plain bytes, shape and name, for the workers."""
        return {
            "digest": self.digest,
            "shape": list(self.values.shape),
            "data": self.values.tobytes(),
        }

    @classmethod
    def from_wire(cls, data: Mapping[str, Any]) -> Vector:
        """Inverse of ``to_wire``."""
        vector = cls(np.frombuffer(data["data"], np.float32).reshape(data["shape"]))
        if vector.digest != data["digest"]:
            raise ProbeError(f"vector {data['digest']} changed on its way to the worker.")
        return vector

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vector) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Vector(shape={list(self.values.shape)}, digest={self.digest[:8]})"
