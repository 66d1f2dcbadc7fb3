"""A worker extension of the table's own: what the runtime's worker still keeps of requests."""

from __future__ import annotations


class Leftovers:
    """Combined with the runtime's extension by ``worker_extension_cls``."""

    def parity_leftovers(self) -> dict[str, int]:
        """How many requests the worker follows and how many results it keeps."""
        state = self.hook_runtime_state  # type: ignore[attr-defined]
        return {"requests": len(state.tracker), "results": len(state._results)}
