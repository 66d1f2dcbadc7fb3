"""Steering as tables for the terminal: what the layers separate, and answers side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rerank.html import replace_surrogates

if TYPE_CHECKING:
    from rich.table import Table

    from core_rerank.steering import SteeringVector

SHOWN = 5


def layers_table(vector: SteeringVector) -> Table:
    """The layers that separate best, and the one that is steered."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=f"{vector.pairs} pairs, {len(vector.layers)} layers",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for column in ("layer", "separation", "length of the vector", "target"):
        table.add_column(column, justify="right")
    table.add_column("")
    order = sorted(range(len(vector.layers)), key=lambda i: -vector.separation[i])[:SHOWN]
    steered = vector.layers.index(vector.layer)
    for i in dict.fromkeys([*order, steered]):
        length = float((vector.directions[i] ** 2).sum() ** 0.5)
        cells = [f"{vector.separation[i]:.2f}", f"{length:.2f}", f"{vector.targets[i]:.2f}"]
        table.add_row(str(vector.layers[i]), *cells, "steered" if i == steered else "")
    return table


def answers_table(
    vector: SteeringVector, model: str, prompts: list[str], answers: dict[str, list[str]]
) -> Table:
    """A row a prompt, a column a way for ``model`` to answer it."""
    from rich.table import Table
    from rich.text import Text

    title = f"layer {vector.layer} of {model}"
    if model != vector.model:
        title += f", by a vector of {vector.model}"
    table = Table(title=title, title_justify="left", show_lines=True)
    table.add_column("prompt", ratio=1, style="bold")
    for name in answers:
        table.add_column(name, ratio=2)
    for i, prompt in enumerate(prompts):
        table.add_row(
            *(Text(_shown(t)) for t in (prompt, *(texts[i] for texts in answers.values())))
        )
    return table


def _shown(text: str) -> str:
    """Lines are kept; characters that would steer the terminal are not."""
    clean = replace_surrogates(text).strip()
    return "".join(c if c.isprintable() or c == "\n" else " " for c in clean)
