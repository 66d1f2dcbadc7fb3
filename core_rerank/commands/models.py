"""``core-rerank models``: the models that are known, and their heads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from .terminal import errors_as_messages, out

if TYPE_CHECKING:
    from rich.text import Text

    from core_rerank.heads import HeadSet


def models(
    heads: Annotated[bool, typer.Option("--heads", help="List the heads and the papers.")] = False,
) -> None:
    """List the models with known retrieval heads; others work with --heads-config."""
    with errors_as_messages(verbose=False):
        from rich.table import Table
        from rich.text import Text

        from core_rerank.heads import packaged_head_sets
        from core_rerank.models import known_models

        embedded = {model.model_id: model for model in known_models()}
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("Model", no_wrap=True)
        for column in ("On disk", "Heads in layers", "Window", "Method"):
            table.add_column(column, overflow="fold")
        for model in embedded.values():
            if all(head_set.model != model.model_id for head_set in packaged_head_sets()):
                table.add_row(_name(model.model_id, model.alias), _present(model.cached), "none")
        by_model = sorted(packaged_head_sets(), key=lambda s: (s.model not in embedded, s.model))
        for head_set in by_model:
            known = embedded.get(head_set.model)
            cached = known.cached if known else _in_hub_cache(head_set.model)
            table.add_row(
                _name(head_set.model, known.alias if known else ""),
                _present(cached),
                _heads(head_set, listed=heads),
                Text(str(head_set.window)),
                _method(head_set, cited=heads),
            )
        out().print(table)
        if not all(head_set.default for head_set in by_model):
            out().print("* not the default: give it with --heads-config", style="dim")


def _name(model_id: str, alias: str) -> Text:
    from rich.text import Text

    return Text.assemble((f"{alias}\n", "bold") if alias else "", model_id)


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
