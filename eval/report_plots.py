"""The report's pictures, as SVG that other pages can embed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from .measures import MAIN
from .report import FIRST_STAGE, Report, SystemReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#023eff", "#ff7c00", "#1ac938", "#8b2be2", "#9f4800", "#f14cc1", "#00a8b5", "#a3a300")
FIRST_COLOUR = "#777777"


def draw_report(report: Report) -> dict[str, str]:
    """Pictures by title, as ``data:`` addresses; the same report gives the same pictures."""
    height = 1.3 + 0.38 * len(report.systems)
    return {
        "Quality by system": _picture(lambda axes: _by_system(report, axes), height),
        "Quality against depth": _picture(lambda axes: _by_depth(report, axes), 4.2),
        "Quality against time": _picture(lambda axes: _by_time(report, axes), 4.2),
    }


def _picture(draw: Callable[[Axes], None], height: float) -> str:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "core-rerank", "font.size": 10}):
        figure = Figure(figsize=(8.0, height), layout="constrained")
        draw(figure.subplots())
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _by_system(report: Report, axes: Axes) -> None:
    systems = list(reversed(report.systems))
    for place, system in enumerate(systems):
        value, (low, high) = system.means[MAIN], system.interval
        axes.errorbar(
            value,
            place,
            xerr=[[max(0.0, value - low)], [max(0.0, high - value)]],
            fmt="o",
            color=_colour(report, system),
            capsize=4,
        )
    axes.axvline(report[FIRST_STAGE].means[MAIN], color=FIRST_COLOUR, linestyle=":", zorder=0)
    axes.set_yticks(range(len(systems)), [system.name for system in systems])
    axes.set_ylim(-0.6, len(systems) - 0.4)
    axes.set_xlabel(f"{MAIN}, 95 % bootstrap interval over queries")
    axes.grid(axis="x", alpha=0.3)


def _by_depth(report: Report, axes: Axes) -> None:
    for system in report.systems:
        depths = list(system.depth_curve)
        first = system.name == FIRST_STAGE
        axes.plot(
            depths,
            list(system.depth_curve.values()),
            marker="." if first else "o",
            markersize=4,
            linestyle=":" if first else "-" if system.depth_curve_exact else "--",
            color=_colour(report, system),
            label=system.name,
        )
    axes.set_xlabel("first-stage candidates reranked (dashed: cut afterwards, not exact)")
    axes.set_ylabel(MAIN)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _by_time(report: Report, axes: Axes) -> None:
    for system in report.systems:
        axes.plot(
            [max(system.cost.seconds_per_query, 1e-6)],
            [system.means[MAIN]],
            marker="*" if system.settings["kind"] == "fusion" else "o",
            markersize=8,
            linestyle="none",
            color=_colour(report, system),
            label=system.name,
        )
    axes.set_xscale("log")
    axes.margins(x=0.15, y=0.2)
    axes.set_xlabel(f"seconds a query, in batches of {report.batch} (first stage: searching)")
    axes.set_ylabel(MAIN)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _colour(report: Report, system: SystemReport) -> str:
    place = [other.name for other in report.systems].index(system.name)
    return COLOURS[(place - 1) % len(COLOURS)] if place else FIRST_COLOUR
