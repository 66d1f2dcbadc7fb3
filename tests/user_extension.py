"""Worker extensions a user may bring along: one fits beside the runtime's, one clashes."""

from __future__ import annotations


class Fitting:
    """Adds a method of its own to the worker."""

    def twice(self, number: int) -> int:
        """Twice the number."""
        return 2 * number


class Clashing:
    """Redefines a method of the runtime's extension."""

    def hook_runtime_take(self) -> None:
        """Never called."""
