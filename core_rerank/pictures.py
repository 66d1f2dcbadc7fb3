"""Pictures as files: what can be drawn here, and figures that appear whole or not at all."""

from __future__ import annotations

import os
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import MissingDependencyError
from .files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg")


def check_picture(path: str | os.PathLike[str]) -> None:
    """Refuse before the work what ``save_figure`` would refuse after it.

    Raises:
        ValueError: ``path`` ends neither in .png nor in .svg.
        MissingDependencyError: matplotlib is not installed.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ValueError(f"a picture's name must end in {' or '.join(FORMATS)}, not {path!s}.")
    if not can_draw():
        raise MissingDependencyError(
            "a picture needs matplotlib. To install it: pip install 'core-rerank[plots]'."
        )


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write PNG or SVG by the ending, replacing ``path`` in one step; equal figures, equal files.

    Raises as ``check_picture`` does.
    """
    check_picture(path)
    from matplotlib import rc_context

    path, drawn = Path(path), BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # The date or the library's version would make equal pictures differ.
    unset = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "core-rerank"}):
        figure.savefig(drawn, format=kind, dpi=120, metadata=unset)
    write_whole(path, drawn.getvalue())
