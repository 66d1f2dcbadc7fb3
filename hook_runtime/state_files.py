"""What a program read, in a safetensors file; numbers are read from it when they are looked at."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .analyzers import Reading
from .errors import ProbeError
from .probes import States
from .programs import Program
from .vectors import Vector

VERSION = "1"


def save_reading(path: str | Path, reading: Reading) -> Reading:
    """Write the states to a file, whole or not at all; the reading with its values mapped to it.

    The file holds ``states.0`` and so on, float32 [layers or heads, rows, width], one a probe, and
    in its metadata the probes, positions and tokens.
    """
    from safetensors.numpy import save_file

    path = Path(path)
    probes = Program(tuple(s.probe for s in reading.states))
    tensors = {f"states.{i}": s.values for i, s in enumerate(reading.states)}
    tensors.update({f"vector.{d}": v.values for d, v in probes.vectors.items()})
    about = {
        "hook_runtime": VERSION,
        "program": probes.wire,
        "positions": json.dumps([s.positions for s in reading.states]),
        "request_id": reading.request_id,
        "prompt_token_ids": json.dumps(reading.prompt_token_ids),
        "token_ids": json.dumps(reading.token_ids),
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, about)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return dataclasses.replace(reading, states=load_states(path))


def load_states(path: str | Path) -> tuple[States, ...]:
    """The states of a file that `save_reading` wrote; values are mapped, not read.

    Raises:
        ProbeError: the file is missing, no such file, or cut off.
    """
    path = Path(path)
    header = _header(path)
    about = header.get("__metadata__", {})
    if not isinstance(about, dict) or about.get("hook_runtime") != VERSION:
        raise ProbeError(f"{path} holds no states of version {VERSION}.")
    try:
        names = [name for name in header if name.startswith("vector.")]
        vectors = [Vector(_mapped(path, header, name)) for name in names]
        program = Program.from_wire(about["program"], {v.digest: v for v in vectors})
        spans = json.loads(about["positions"])
        return tuple(
            States(probe, (span[0], span[1]), _mapped(path, header, f"states.{i}"))
            for i, (probe, span) in enumerate(zip(program.probes, spans, strict=True))
        )
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise ProbeError(f"{path} is damaged: {type(error).__name__}: {error}.") from error


def _header(path: Path) -> dict[str, Any]:
    """A safetensors file begins with its header's length, 8 bytes, and the header as JSON."""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < size <= os.fstat(file.fileno()).st_size - 8:
                raise ValueError("its first 8 bytes are no header's length")
            header = json.loads(file.read(size))
    except FileNotFoundError as error:
        raise ProbeError(f"there is no file {path}.") from error
    except (OSError, ValueError) as error:
        raise ProbeError(f"{path} is not a safetensors file ({error}).") from error
    if not isinstance(header, dict):
        raise ProbeError(f"{path} is not a safetensors file: its header is no table.")
    return {**header, "": {"begin": 8 + size}}


def _mapped(path: Path, header: dict[str, Any], name: str) -> np.ndarray:
    shape = tuple(header[name]["shape"])
    if 0 in shape:
        return np.zeros(shape, np.float32)
    offset = header[""]["begin"] + header[name]["data_offsets"][0]
    return np.memmap(path, np.float32, "r", offset, shape)
