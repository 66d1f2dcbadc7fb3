"""Worker extensions a user may bring along: one fits beside the runtime's, one clashes."""

from __future__ import annotations


class Fitting:
    """Adds methods of its own to the worker."""

    def greet(self, name: str) -> str:
        """A greeting that only a worker can give."""
        return f"hello {name} from rank {self.rank}"  # type: ignore[attr-defined]

    def twice(self, number: int) -> int:
        """Twice the number."""
        return 2 * number


class Clashing:
    """Redefines a method of the runtime's extension."""

    def hook_runtime_take(self) -> None:
        """Never called."""
