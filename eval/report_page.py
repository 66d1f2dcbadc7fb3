"""The report as one HTML page that needs no network, no script and no other file."""

from __future__ import annotations

import json
from typing import Any

from core_rerank.pictures import can_draw

from .measures import MAIN, measure_names
from .report import Report, SystemReport
from .report_plots import draw_report

NO_PICTURES = "Pictures need matplotlib: pip install 'core-rerank[plots]'."


def render_report(report: Report, metrics: dict[str, Any]) -> str:
    """The page. ``metrics`` is what ``metrics.json`` holds; every text is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("core_rerank"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=_number, signed=_signed, p=_p, seconds=_seconds)
    names = measure_names(report.candidates.depth)
    template = environment.get_template("evaluation.html.j2")
    page = template.render(
        metrics=metrics,
        systems=report.systems,
        names=names,
        best={name: max(s.means[name] for s in report.systems) for name in names},
        main=MAIN,
        pictures=draw_report(report) if can_draw() else {},
        no_pictures=NO_PICTURES,
        failed=[system for system in report.systems if system.failed],
        details=[(system.name, _details(system)) for system in report.systems],
    )
    return page.encode("utf-8", "replace").decode("utf-8") + "\n"


def _details(system: SystemReport) -> str:
    about = {"settings": system.settings, "engine": system.facts}
    return json.dumps(about, indent=1, ensure_ascii=False, default=str)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}".replace("-", "\N{MINUS SIGN}")


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "\N{MINUS SIGN}")


def _p(value: float) -> str:
    return "< .0001" if value < 1e-4 else f"{value:.4f}".removeprefix("0")


def _seconds(value: float) -> str:
    return f"{value:.4g}"
