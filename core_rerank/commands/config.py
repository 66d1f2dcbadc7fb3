"""``core-rerank config``: what a program's config may say, and whether one says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

config = typer.Typer(
    help="Programs for the hooked engine: print the schema of their configs, check one.",
    no_args_is_help=True,
)


@config.command("schema")
def schema() -> None:
    """Print the JSON schema of a config, with the probes and analyzers installed here.

    Exit with 1 if another package's cannot be loaded.
    """
    from hook_runtime import HookRuntimeError
    from hook_runtime.config import json_schema

    try:
        found = json_schema()
    except HookRuntimeError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    typer.echo(json.dumps(found, indent=2))


@config.command("validate")
def validate(
    paths: Annotated[list[Path], typer.Argument(metavar="CONFIG...", help="YAML or JSON files.")],
) -> None:
    """Check configs and the vectors they name; exit with 1 if one is wrong."""
    from hook_runtime import HookRuntimeError
    from hook_runtime.config import load_config

    wrong = 0
    for path in paths:
        try:
            found = load_config(path)
        except HookRuntimeError as error:
            typer.echo(str(error), err=True)
            wrong += 1
            continue
        program = found.program
        probes = len(program.probes) + (found.attention is not None)
        analyzer = found.analyzer.kind if found.analyzer else "none"
        typer.echo(
            f"{path}: right: {found.model}, probes: {probes}, "
            f"interventions: {len(program.interventions)}, analyzer: {analyzer}"
        )
    if wrong:
        raise typer.Exit(1)
