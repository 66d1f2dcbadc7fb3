"""``core-rerank models``: the models that are known, and their heads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import errors_as_messages, out

if TYPE_CHECKING:
    from rich.text import Text

    from core_rerank.heads import HeadSet

SUFFIX = ".yaml"


def models(
    heads: Annotated[bool, typer.Option("--heads", help="List the heads and the papers.")] = False,
) -> None:
    """List the models with known retrieval heads; others work with --heads-config."""
    with errors_as_messages(verbose=False):
        from rich.table import Table
        from rich.text import Text

        from core_rerank.heads import config_folder, packaged_files
        from core_rerank.models import known_models

        files = packaged_files()
        embedded = {model.model_id: model for model in known_models()}
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("Model, head set", no_wrap=True)
        for column in ("Disk", "Heads in layers", "Window", "Method"):
            table.add_column(column, overflow="fold")
        for model in embedded.values():
            if all(head_set.model != model.model_id for head_set in files.values()):
                table.add_row(_name(model.model_id, model.alias), _present(model.cached), "none")
        by_model = sorted(
            files.items(), key=lambda item: (item[1].model not in embedded, item[1].model)
        )
        for file, head_set in by_model:
            known = embedded.get(head_set.model)
            cached = known.cached if known else _in_hub_cache(head_set.model)
            table.add_row(
                _name(head_set.model, known.alias if known else "", file),
                _present(cached),
                _heads(head_set, listed=heads),
                Text(str(head_set.window)),
                _method(head_set, cited=heads),
            )
        out().print(table)
        folder = Path(str(config_folder())).resolve()
        out().print(
            f"* not the default: give its file, --heads-config {folder}/HEAD-SET{SUFFIX}",
            style="dim",
            markup=False,
            soft_wrap=True,
        )


def _name(model_id: str, alias: str, file: str = "") -> Text:
    from rich.text import Text

    head_set = (f"\n{file.removesuffix(SUFFIX)}", "dim") if file else ""
    return Text.assemble((f"{alias}\n", "bold") if alias else "", model_id, head_set)


def _present(cached: bool) -> Text:
    from rich.text import Text

    return Text("yes", style="green") if cached else Text("no", style="dim")


def _heads(head_set: HeadSet, *, listed: bool) -> Text:
    from rich.text import Text

    last = max(head.layer for head in head_set.heads) + 1
    text = Text(f"{len(head_set.heads)} in {last}/{head_set.num_layers}")
    if listed:
        text.append("\n" + " ".join(map(str, head_set.heads)), style="dim")
    return text


def _method(head_set: HeadSet, *, cited: bool) -> Text:
    from rich.text import Text

    paper = re.search(r"arXiv [0-9.]*[0-9]", head_set.source)
    text = Text(head_set.method + ("" if head_set.default else "*"))
    if cited and paper:
        text.append(f"\n{paper.group()}", style="dim")
    return text


def _in_hub_cache(model_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model_id, "config.json"), str)
