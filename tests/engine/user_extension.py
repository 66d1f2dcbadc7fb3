"""A user's own worker extension, and one whose names clash with the runtime's."""


class Greeter:
    """Adds one remote procedure of its own."""

    def greet(self, name: str) -> str:
        return f"hello {name} from rank {self.rank}"  # type: ignore[attr-defined]


class Clashing:
    """Defines a procedure the runtime has, too."""

    def hook_runtime_take(self, capture_ids: list[str]) -> list[str]:
        return capture_ids
