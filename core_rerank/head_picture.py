"""A picture of a detection: layers by heads with the chosen ones marked, and quality against k."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .head_detection import Detection
from .pictures import check_picture, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_NUMBERED = 16
_MARK = "#e8000b"
_SCORE_NAMES = {
    "core": "contrastive score",
    "weighted": "contrastive score",
    "signed": "contrastive score",
    "qr": "attention to positives",
    "ndcg": "nDCG@10 of the head alone",
}


def draw_detection(detection: Detection, path: str | os.PathLike[str]) -> None:
    """Write the picture, replacing ``path`` in one step; PNG or SVG by its ending.

    The same detection gives the same file. Raises as ``check_picture`` does.
    """
    check_picture(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    layers, heads = detection.scores.shape
    height = min(max(1.2 + 0.22 * heads, 2.6), 8.0)
    width = min(max(3.0 + 0.27 * layers, 8.0), 18.0)
    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(width, height + 4.0), layout="constrained")
        above, below = figure.subplots(2, 1, height_ratios=[height, 3.4])
        figure.suptitle(_title(detection), fontsize=11)
        _draw_map(detection, above, figure)
        _draw_quality(detection, below)
        save_figure(figure, path)


def _title(detection: Detection) -> str:
    selection, measured = detection.selection, detection.measurement
    window = "pointwise" if measured.window == 1 else f"window {measured.window}"
    return (
        f"{measured.model.name}\n{len(detection.heads)} heads by {selection.method}, "
        f"{detection.queries} queries of {measured.data or 'unnamed data'}, {window}"
    )


def _draw_map(detection: Detection, axes: Axes, figure: Any) -> None:
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    layers, heads = detection.scores.shape
    image = axes.imshow(
        detection.scores.T, aspect="auto", origin="lower", cmap="Blues", interpolation="nearest"
    )
    figure.colorbar(image, ax=axes, label=_SCORE_NAMES[detection.selection.method], pad=0.01)
    small = 7 if max(layers, heads) <= 40 else 5
    lightest, darkest = image.get_clim()
    for rank, head in enumerate(detection.heads, start=1):
        corner = (head.layer - 0.5, head.head - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=_MARK, linewidth=1.8))
        if len(detection.heads) <= _NUMBERED:
            dark = detection.scores[head] > (lightest + darkest) / 2
            axes.text(
                head.layer,
                head.head,
                str(rank),
                ha="center",
                va="center",
                fontsize=small,
                fontweight="bold",
                color="white" if dark else "black",
            )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    axes.set_xlabel("layer")
    axes.set_ylabel("head")
    numbered = ", numbered from the best" if len(detection.heads) <= _NUMBERED else ""
    axes.set_title(f"Heads; the chosen ones in red{numbered}", fontsize=10)


def _draw_quality(detection: Detection, axes: Axes) -> None:
    from matplotlib.ticker import NullLocator

    counts = sorted(detection.held_out)
    chosen = len(detection.heads)
    if counts:
        quality = [detection.held_out[count].ndcg_at_10 for count in counts]
        name = f"{detection.selection.method}, queries not used to choose (5 folds)"
        axes.plot(counts, quality, marker="o", color="#023eff", label=name)
        for count, value in zip(counts, quality, strict=True):
            axes.annotate(
                f"{value:.3f}",
                (count, value),
                xytext=(0, -15),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
    axes.plot(
        [chosen],
        [detection.chosen.ndcg_at_10],
        marker="*",
        markersize=12,
        linestyle="none",
        color=_MARK,
        label="the chosen heads on the queries they were chosen on",
    )
    axes.axhline(detection.all_heads.ndcg_at_10, color="#555555", linestyle="--", label="all heads")
    axes.axhline(
        detection.random.ndcg_at_10, color="#999999", linestyle=":", label=f"{chosen} random heads"
    )
    axes.set_xscale("log", base=2)
    ticks = counts or [chosen]
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(y=0.15)
    axes.set_xlabel("number of heads k")
    axes.set_ylabel("nDCG@10")
    axes.set_title("Ranking quality against the number of heads", fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="best")
