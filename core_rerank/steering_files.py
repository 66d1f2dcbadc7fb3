"""A steering vector's folder: tensors with what is known of them, and a config that steers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DataError
from .files import write_whole

if TYPE_CHECKING:
    from hook_runtime.positions import Positions

    from .steering import SteeringVector

VECTORS = "steering.safetensors"
CONFIG = "program.yaml"
FORMAT = "core-rerank steering 1"


def write_folder(
    vector: SteeringVector, folder: Path, coefficient: float | None, positions: Positions
) -> Path:
    """Both files, the vectors first; each in one step. Returns the config's path.

    Raises:
        ValueError: the coefficient is not finite.
    """
    import numpy as np
    import yaml
    from safetensors.numpy import save

    if coefficient is not None and not math.isfinite(coefficient):
        raise ValueError(f"the coefficient must be a finite number, not {coefficient!r}.")
    tensors = {
        f"layer.{layer}": np.ascontiguousarray(row)
        for layer, row in zip(vector.layers, vector.directions, strict=True)
    }
    tensors |= {"targets": vector.targets, "separation": vector.separation}
    about = {
        "model": vector.model,
        "revision": vector.revision,
        "layers": vector.layers,
        "layer": vector.layer,
        "pairs": vector.pairs,
    }
    config = yaml.safe_dump(_config(vector, coefficient, positions), sort_keys=False, width=99)
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {"format": FORMAT, "about": json.dumps(about)}
    write_whole(folder / VECTORS, save(tensors, metadata))
    write_whole(folder / CONFIG, config)
    return folder / CONFIG


def _config(
    vector: SteeringVector, coefficient: float | None, positions: Positions
) -> dict[str, Any]:
    tensor = {"file": VECTORS, "name": f"layer.{vector.layer}"}
    steering: dict[str, Any] = {"layers": [vector.layer], "vector": tensor}
    if coefficient is None:
        target = float(vector.targets[vector.layers.index(vector.layer)])
        steering = {"type": "project_to", **steering, "target": target}
    else:
        steering = {"type": "add_vector", **steering, "coefficient": float(coefficient)}
    where = positions if isinstance(positions, str) else list(positions)
    revision = {} if vector.revision is None else {"revision": vector.revision}
    steering["positions"] = where
    return {"model": vector.model, **revision, "interventions": [steering]}


def read_folder(folder: Path) -> dict[str, Any]:
    """The fields of a `SteeringVector`.

    Raises:
        DataError: the folder or its file is missing, damaged or of another kind.
    """
    import numpy as np
    from safetensors import SafetensorError, safe_open

    path = folder / VECTORS
    if not path.is_file():
        raise DataError(
            f"{folder} holds no {VECTORS}: give a folder that `core-rerank steer fit` or "
            "SteeringVector.save wrote."
        )
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}. Fit the vector again.") from error
    if metadata.get("format") != FORMAT:
        raise DataError(
            f"{path} is no steering vector of this release: its format is "
            f"{metadata.get('format')!r}, not {FORMAT!r}. Fit the vector again."
        )
    try:
        about = json.loads(metadata["about"])
        layers = tuple(about["layers"])
        return {
            "model": about["model"],
            "revision": about["revision"],
            "layers": layers,
            "directions": np.stack([tensors[f"layer.{layer}"] for layer in layers]),
            "targets": tensors["targets"],
            "separation": tensors["separation"],
            "pairs": about["pairs"],
            "layer": about["layer"],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} lacks {error}. Fit the vector again.") from error
