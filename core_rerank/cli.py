"""The ``core-rerank`` command: what its subcommands are; each lives in ``commands``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .commands.config import config
from .commands.demo import demo
from .commands.detect_heads import detect_heads
from .commands.detect_injection_heads import TaskName, detect_injection_heads
from .commands.doctor import doctor
from .commands.evaluate import evaluate
from .commands.first_stage import index, search
from .commands.models import models
from .commands.rerank import rerank
from .commands.serve import serve
from .commands.steer import steer

INJECTION_HEADS = "detect-injection-heads"


class _ByTask(TyperGroup):
    """``detect-heads --task injection`` is a command of its own, with its own options."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` name, and its arguments."""
        if args[:1] == ["detect-heads"] and _task(args) == TaskName.INJECTION:
            args = [INJECTION_HEADS, *args[1:]]
        return super().resolve_command(ctx, args)


def _task(args: list[str]) -> str | None:
    """What ``--task`` says in ``args``."""
    for word, following in zip(args, [*args[1:], None], strict=True):
        if word == "--task":
            return following
        if word.startswith("--task="):
            return word.removeprefix("--task=")
    return None


app = typer.Typer(
    name="core-rerank",
    cls=_ByTask,
    help="Rank documents by the attention a language model's retrieval heads pay them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(rerank)
app.command()(serve)
app.command()(demo)
app.command("detect-heads")(detect_heads)
app.command(INJECTION_HEADS, hidden=True)(detect_injection_heads)
app.command("eval")(evaluate)
app.command()(doctor)
app.command()(models)
app.command()(index)
app.command()(search)
app.add_typer(config, name="config")
app.add_typer(steer, name="steer")


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"core-rerank {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show and exit."),
    ] = False,
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """Entry point: runs the command line and leaves quietly when a pipe is closed or Ctrl-C hit.

    A SIGTERM unwinds like an exit, so that the engine's processes are stopped too.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except BrokenPipeError:
        # Whoever read stdout has gone; keep the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
