"""The rows of the parity table: made from what an engine showed, printed, and written as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from core_rerank.files import write_whole

from .judge import Figures
from .scenarios import Scenario


@dataclass(slots=True)
class Row:
    """One condition on one engine.

    ``verdict`` is "ok", or begins with "failed", "refused: " or "not run: ". ``seconds`` is the
    condition's time, ``engine_seconds`` that of the engine with its start and all conditions.
    """

    scenario: str
    condition: str
    model: str
    dtype: str
    arguments: dict[str, Any]
    environment: dict[str, str]
    runner: str = ""
    figures: Figures | None = None
    cached_tokens: int = 0
    recomputed: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    engine_seconds: float = 0.0
    date: str = ""
    commit: str = ""
    verdict: str = "not run: not reached"

    @property
    def key(self) -> str:
        """What ``--only`` looks at."""
        return f"{self.scenario} / {self.condition}"

    @property
    def failed(self) -> bool:
        return self.verdict.startswith("failed")


def planned(scenario: Scenario, device: str) -> list[Row]:
    """The scenario's rows before anything ran."""
    return [
        Row(
            scenario.name,
            condition,
            scenario.model,
            scenario.dtype_on(device),
            dict(scenario.arguments),
            dict(scenario.environment),
        )
        for condition in scenario.conditions
    ]


def runner_name(path: str) -> str:
    """ "V1" or "V2" for the module path of a model runner of vLLM's."""
    second = path.startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
    return f"{'V2' if second else 'V1'} ({path.rsplit('.', 1)[-1]})" if path else ""


def print_table(rows: Sequence[Row], title: str) -> None:
    """The rows on stdout, and how many there are of each verdict."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("engine", "condition", "dtype", "runner", "error", "allowed", "ranks", "verdict"):
        table.add_column(name, overflow="fold")
    last = ""
    for row in rows:
        table.add_row(
            row.scenario if row.scenario != last else "",
            row.condition,
            row.dtype.replace("bfloat16", "bf16"),
            row.runner.partition(" ")[0],
            *_figures(row.figures),
            row.verdict,
            style="red" if row.failed else None,
        )
        last = row.scenario
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table)
    for row in rows:
        for note in row.notes:
            console.print(f"{row.key}: {note}", highlight=False, markup=False)
    counts = {
        kind: sum(r.verdict.startswith(kind) for r in rows)
        for kind in ("ok", "failed", "refused", "not run")
    }
    console.print(", ".join(f"{n} {kind}" for kind, n in counts.items()))


def _figures(figures: Figures | None) -> tuple[str, str, str]:
    if figures is None:
        return "", "", ""
    allowed = f"{figures.allowed:.1e}"
    ranks = f"{figures.agreeing}/{figures.captures}"
    if figures.plain_error is not None:
        allowed += f" (plain {figures.plain_error:.1e})"
        ranks += f" (plain {figures.plain_agreeing})"
    return f"{figures.error:.1e}", allowed, ranks


def write_json(rows: Iterable[Row], path: Path, about: dict[str, Any]) -> None:
    """All rows, with ``about`` saying what they were measured on; the file is never half there."""
    data = {**about, "rows": [asdict(row) for row in rows]}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(data, indent=1, default=str) + "\n")


def read_rows(path: Path) -> dict[str, Row]:
    """The rows of an earlier run, by key; none where there was no run."""
    if not path.exists():
        return {}
    rows = {}
    for data in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        figures = data.pop("figures")
        row = Row(**data, figures=Figures(**figures) if figures else None)
        rows[row.key] = row
    return rows
