"""Notices a script without an ``if __name__ == '__main__'`` guard before vLLM trips over it."""

from __future__ import annotations

import ast
import multiprocessing
import sys
from pathlib import Path

from . import compat
from .errors import HookRuntimeError

FIX = (
    "vLLM starts worker processes, and each of them imports your script again. Guard the script's "
    "entry point:\n\n    if __name__ == '__main__':\n        main()\n"
)


def refuse_unguarded_script() -> None:
    """Raise HookRuntimeError when the running script would start engines without end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise HookRuntimeError(FIX)
    if not compat.starts_by_spawn() or _run_as_package():
        return
    where = _module_level_line()
    if where is not None and not _is_guarded(*where):
        raise HookRuntimeError(f"{where[0]}, line {where[1]}: {FIX}")


def _run_as_package() -> bool:
    """``python -m package``: a spawned process does not import ``package.__main__`` again."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.endswith(".__main__")


def _module_level_line() -> tuple[str, int] | None:
    """File and line at which the main script's own module level is executing, if it is a file."""
    frame = sys._getframe()
    while frame is not None:
        names = frame.f_globals
        if frame.f_code.co_name == "<module>" and names.get("__name__") == "__main__":
            path = names.get("__file__")
            return (path, frame.f_lineno) if path and Path(path).is_file() else None
        frame = frame.f_back
    return None


def _is_guarded(path: str, line: int) -> bool:
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError):
        return True  # not a script that can be read: let vLLM decide
    return any(
        isinstance(node, ast.If)
        and node.lineno <= line <= (node.end_lineno or line)
        and "__name__" in ast.unparse(node.test)
        for node in tree.body
    )
