"""A picture of a steering vector's layers: how far apart the two sides of held-out pairs lie."""

from __future__ import annotations

import os

from .pictures import check_picture, save_figure
from .steering import SteeringVector


def draw_separation(vector: SteeringVector, path: str | os.PathLike[str]) -> None:
    """Write PNG or SVG by the ending, replacing ``path`` in one step.

    Raises as ``check_picture`` does.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(8.0, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(vector.layers, vector.separation, marker="o", color="#023eff")
        axes.axvline(vector.layer, color="#e8000b", linestyle="--", label=f"layer {vector.layer}")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
        axes.set_ylim(bottom=min(0.0, float(vector.separation.min())))
        axes.set_xlabel("layer")
        axes.set_ylabel("separation, in standard deviations")
        axes.set_title(
            f"{vector.model}: {vector.pairs} pairs, each along the direction of others",
            fontsize=10,
        )
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=9)
        save_figure(figure, path)
