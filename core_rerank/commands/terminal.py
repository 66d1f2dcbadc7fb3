"""What every command shares: where output goes, quiet engines, progress, errors, files."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

from core_rerank.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT = 2
FAILURE = 1
LAST_WORDS = 12
OURS = ("core_rerank", "hook_runtime")


class CommandError(Exception):
    """Ends a command with one clear line; ``code`` is 2 for bad input, 1 for a failure."""

    def __init__(self, message: str, code: int = BAD_INPUT) -> None:
        super().__init__(message)
        self.code = code


def out() -> Console:
    """Where results go: stdout."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def err() -> Console:
    """Where everything that is not a result goes: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(text: str, style: str | None = None) -> None:
    """A line on stderr, never wrapped, never read as markup."""
    err().print(text, style=style, markup=False, soft_wrap=True)


@contextmanager
def errors_as_messages(verbose: bool) -> Iterator[None]:
    """Turn exceptions into one line on stderr and an exit code; ``verbose`` keeps tracebacks.

    Values, types and files the user gave end with code 2, everything else with code 1. Warnings
    that these packages log become lines too.
    """
    import typer

    from core_rerank.errors import CoreRerankError
    from hook_runtime.errors import HookRuntimeError

    try:
        with _log_lines():
            yield
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except CommandError as error:
        say(f"error: {error}", "bold red")
        raise typer.Exit(error.code) from None
    except Exception as error:  # the boundary: nothing above may show a traceback
        if verbose:
            raise
        bad_input = isinstance(error, ValueError | TypeError | FileNotFoundError)
        ours = isinstance(error, CoreRerankError | HookRuntimeError)
        if isinstance(error, OSError) and error.filename and error.strerror:
            message = f"{error.filename}: {error.strerror}."
        else:
            message = str(error) if ours or bad_input else f"{type(error).__name__}: {error}"
        say(f"error: {message.strip()}", "bold red")
        if not ours:
            say("Run again with -v for the engine's log and the traceback.")
        raise typer.Exit(BAD_INPUT if bad_input else FAILURE) from None


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.levelname.lower()}: {record.getMessage()}", "yellow")


@contextmanager
def _log_lines() -> Iterator[None]:
    handler = _Lines(logging.WARNING)
    loggers = [logging.getLogger(name) for name in OURS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@contextmanager
def quiet_engine(verbose: bool) -> Iterator[None]:
    """Keep engines off the terminal while the block runs: logs, bars, their subprocess's output.

    Stdout stays data only, whatever a library prints: file descriptors 1 and 2 point to a log
    file meanwhile, and what this process writes through Python goes to stderr. When the block
    fails, the log's last lines are shown. With ``verbose`` all of it goes to stderr.
    """
    _set_log_levels(verbose)
    with ExitStack() as stack:
        terminal = stack.enter_context(_terminal())
        stack.enter_context(redirect_stdout(terminal))
        stack.enter_context(redirect_stderr(terminal))
        stack.enter_context(_our_warnings_only(verbose))
        if verbose:
            stack.enter_context(_descriptors({1: 2}))
            yield
            return
        log = stack.enter_context(tempfile.TemporaryFile())
        stack.enter_context(_descriptors({1: log.fileno(), 2: log.fileno()}))
        try:
            yield
        except Exception:
            _show_last_words(log)
            raise


def _set_log_levels(verbose: bool) -> None:
    """Through the variables that vLLM and transformers read themselves; a user's own win."""
    if verbose:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # what it says before it reads the variable
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    downloads_shown = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()


@contextmanager
def _terminal() -> Iterator[TextIO]:
    """Stderr under a file descriptor of its own, so that it outlives the redirection of 2."""
    try:
        number = sys.stderr.fileno()
    except (AttributeError, io.UnsupportedOperation):
        yield sys.stderr
        return
    sys.stderr.flush()
    with os.fdopen(os.dup(number), "w", encoding="utf-8", errors="replace", buffering=1) as stream:
        yield stream


@contextmanager
def _descriptors(targets: dict[int, int]) -> Iterator[None]:
    """Point file descriptors elsewhere, and back afterwards."""
    saved = {number: os.dup(number) for number in targets}
    try:
        for number, target in targets.items():
            os.dup2(target, number)
        yield
    finally:
        for number, copy in saved.items():
            os.dup2(copy, number)
            os.close(copy)


@contextmanager
def _our_warnings_only(verbose: bool) -> Iterator[None]:
    """Warnings raised in these packages become one line; those of others are for ``-v``."""
    with warnings.catch_warnings():
        if not verbose:
            ours = tuple(str(Path(__file__).parents[2] / name) for name in OURS)

            def show(message: Warning | str, category: Any, filename: str, *_: Any) -> None:
                if filename.startswith(ours):
                    say(f"warning: {message}", "yellow")

            warnings.showwarning = show
        yield


def _show_last_words(log: IO[bytes]) -> None:
    log.seek(0)
    lines = log.read().decode("utf-8", errors="replace").strip().splitlines()
    if lines:
        say("The engine's last words (-v shows all):", "dim")
        for line in lines[-LAST_WORDS:]:
            say(f"  {line}", "dim")


@contextmanager
def working(text: str) -> Iterator[None]:
    """A spinner on stderr while the block runs; where there is no terminal, one line."""
    console = err()
    if not console.is_terminal:
        say(f"{text} ...")
        yield
        return
    with console.status(text):
        yield


@contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr; yields its (done, total). Where there is no terminal, a line a tenth."""
    console = err()
    if not console.is_terminal:
        said = -1

        def tell(done: int, total: int) -> None:
            nonlocal said
            if total and 10 * done // total > said:
                said = 10 * done // total
                say(f"{text}: {done} of {total}")

        yield tell
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def check_output(path: Path) -> None:
    """Say before the work starts that ``path`` cannot be written after it."""
    if path.is_dir():
        raise CommandError(f"cannot write {path}: it is a folder; name a file in it.")
    if not path.absolute().parent.is_dir():
        raise CommandError(
            f"cannot write {path}: the folder {path.absolute().parent} does not exist; create it."
        )


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all; devices and pipes are written directly."""
    check_output(path)
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_text(text, encoding="utf-8")
        return
    write_whole(target, text)
