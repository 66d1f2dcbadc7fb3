"""``core-rerank doctor``: what is installed, where things are kept, and does it really work."""

from __future__ import annotations

import typer

from .checks import FAIL, Check, environment_checks, model_checks
from .options import DEFAULT_MODEL, Backend, BackendOption, ModelOption, VerboseOption
from .self_test import self_test
from .terminal import FAILURE, errors_as_messages, out

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    model: ModelOption = DEFAULT_MODEL,
    backend: BackendOption = Backend.VLLM,
    verbose: VerboseOption = False,
) -> None:
    """Check the installation and run a self-test; exit code 1 if something is broken."""
    with errors_as_messages(verbose):
        checks = []
        for check in environment_checks(backend.value):
            _print(check)
            checks.append(check)
        broken = any(check.status == FAIL for check in checks)
        for check in model_checks(model):
            _print(check)
            checks.append(check)
            broken = broken or check.status == FAIL
        if broken:
            _print(Check(FAIL, "self-test", "not run", "repair the lines marked fail first"))
            raise typer.Exit(FAILURE)
        results = self_test(model, backend.value, verbose)
        for check in results:
            _print(check)
        if any(check.status == FAIL for check in results):
            raise typer.Exit(FAILURE)


def _print(check: Check) -> None:
    from rich.text import Text

    line = Text(f"{check.status:<4}", style=STYLES[check.status])
    line.append(f"  {check.name}: {check.found}", style="not bold default")
    if check.fix:
        line.append(f" -> {check.fix}", style="yellow")
    out().print(line, soft_wrap=True)
