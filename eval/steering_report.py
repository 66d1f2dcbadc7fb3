"""What steering was measured to do, as a Markdown page and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from core_rerank.pictures import can_draw, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "nothing": "#999999",
    "instruction": "#023eff",
    "steering": "#ff7c00",
    "both": "#1ac938",
}
EXAMPLE = 110


def markdown(found: dict[str, Any]) -> str:
    """The page; ``found`` is what ``steering.json`` holds."""
    prompts = found["prompts"]
    lines = [
        "# Steering instead of instructing",
        "",
        f"{found['model']}, float32, greedy answers of at most 64 tokens. A vector is fitted on "
        f"{prompts['fit']} prompts; contrast, layer and coefficient are chosen on "
        f"{prompts['development']} others; the table is of {prompts['test']} prompts used for "
        "neither. Written by `python -m core_rerank.eval.steering`; all settings tried are in "
        "`steering.json`.",
        "",
        "Share of answers that have the form (checked by a program; looping or empty answers, and "
        "for one sentence and JSON answers that were cut off, count as failures), with Wilson's "
        "95 % interval:",
        "",
        "| constraint | nothing | instruction | steering | both | steered by |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found["constraints"].items():
        cells = [_rate(condition) for condition in one["conditions"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {_setting(one['setting'])} |")
    lines += ["", "The settings that each was chosen from:", "", *_searched(found["constraints"])]
    lines += [
        "",
        "What it costs. Perplexity of the answers by the model as it is, after the prompt without "
        "the instruction: a form that the model would not choose is itself surprising, so the "
        "instruction's column is the one to compare with. In brackets the share of readable "
        "answers (at least four words, at least half of them different):",
        "",
        "| constraint | nothing | instruction | steering | both |",
        "|---|---|---|---|---|",
    ]
    for name, one in found["constraints"].items():
        cells = [f"{c['perplexity']:.1f} ({c['readable']:.2f})" for c in one["conditions"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "The first test prompt's answers:", "", "| constraint | nothing | steering |"]
    lines.append("|---|---|---|")
    for name, one in found["constraints"].items():
        shown = [_example(one["conditions"][c]["example"]) for c in ("nothing", "steering")]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> bool:
    """Bars of the four conditions by constraint; False, and no file, without matplotlib."""
    if not can_draw():
        return False
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 10}):
        figure = Figure(figsize=(9.0, 5.6), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        _bars(found, above, "followed", "answers that have the form")
        above.set_ylim(0, 1.05)
        above.legend(ncols=4, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.22))
        _bars(found, below, "perplexity", "perplexity")
        below.set_ylim(bottom=0)
        save_figure(figure, path)
    return True


def _bars(found: dict[str, Any], axes: Axes, key: str, label: str) -> None:
    names = list(found["constraints"])
    for place, (condition, colour) in enumerate(COLOURS.items()):
        rows = [found["constraints"][name]["conditions"][condition] for name in names]
        values = [row[key] for row in rows]
        at = [i + 0.2 * (place - 1.5) for i in range(len(names))]
        spread = None
        if key == "followed":
            low = [max(0.0, v - row["interval"][0]) for v, row in zip(values, rows, strict=True)]
            high = [max(0.0, row["interval"][1] - v) for v, row in zip(values, rows, strict=True)]
            spread = [low, high]
        axes.bar(at, values, 0.18, yerr=spread, color=colour, label=condition, capsize=2)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel(label)
    axes.grid(axis="y", alpha=0.3)


def _rate(condition: dict[str, Any]) -> str:
    low, high = condition["interval"]
    return f"{condition['followed']:.2f} ({low:.2f} to {high:.2f})"


def _setting(setting: dict[str, Any]) -> str:
    return f"{setting['contrast']}, layer {setting['layer']}, {_amount(setting['coefficient'])}"


def _amount(coefficient: float | None) -> str:
    return "projected" if coefficient is None else f"coefficient {coefficient:g}"


def _searched(constraints: dict[str, Any]) -> list[str]:
    """A line for each grid that was searched, naming the constraints chosen from it."""
    names: dict[str, list[str]] = {}
    for name, one in constraints.items():
        names.setdefault(_grid(one["development"]), []).append(name)
    return [f"- {', '.join(alike)}: {grid}" for grid, alike in names.items()]


def _grid(development: list[dict[str, Any]]) -> str:
    parts = []
    for contrast in dict.fromkeys(trial["contrast"] for trial in development):
        trials = [trial for trial in development if trial["contrast"] == contrast]
        layers = dict.fromkeys(str(trial["layer"]) for trial in trials)
        values = dict.fromkeys(_amount(trial["coefficient"]) for trial in trials)
        parts.append(f"{contrast}, layers {', '.join(layers)}, each {', '.join(values)}")
    return f"{len(development)} settings ({'; '.join(parts)})"


def _example(text: str) -> str:
    line = " ".join(text.split()).replace("|", "\\|")
    return line if len(line) <= EXAMPLE else f"{line[:EXAMPLE]}…"
