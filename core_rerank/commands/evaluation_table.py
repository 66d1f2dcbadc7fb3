"""An evaluation as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .terminal import out

if TYPE_CHECKING:
    from rich.table import Table


WIDTH = 100
COLUMNS = ("nDCG@10", "MAP", "MRR@10")


def print_evaluation(report: Any) -> None:
    """Systems by measures, and their gain over the first stage; ``report`` is eval's `Report`."""
    console = out()
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    console.print(_table(report))


def _table(report: Any) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    dataset, candidates = report.dataset, report.candidates
    title = Text(
        f"{dataset.name}: {len(dataset.queries)} queries, {candidates.retriever} top "
        f"{candidates.depth}",
        style="bold",
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("System", overflow="fold")
    shown = [*COLUMNS, list(report.systems[0].means)[-1]]
    for name in (*shown, "gain", "95 %", "p", "s/query"):
        table.add_column(name, justify="right", no_wrap=True)
    for system in report.systems:
        change = system.comparison
        gain = ("", "", "")
        if change is not None:
            interval = f"{_signed(change.low)} {_signed(change.high)}"
            gain = (_signed(change.difference), interval, _plain(change.p))
        values = [_plain(system.means[name]) for name in shown]
        table.add_row(Text(system.name), *values, *gain, f"{system.cost.seconds_per_query:.3g}")
    return table


def _plain(value: float) -> str:
    return f"{value:.4f}".removeprefix("0")


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("0.", ".", 1)
