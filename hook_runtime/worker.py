"""The class vLLM mixes into its workers: the remote procedures of the runtime.

Arguments and results are plain lists, dicts, strings and bytes, so vLLM's default serialisation
carries them. ``Composed_<hex>`` names resolve to this extension combined with a user's own.
"""

from __future__ import annotations

import functools
from typing import Any

from . import loader  # noqa: F401  registers the truncating loader in the worker's process
from .capture import CaptureState
from .errors import HookRuntimeError
from .specs import Head

EXTENSION = f"{__name__}.WorkerExtension"
_COMPOSED = "Composed_"


class WorkerExtension:
    """Methods added to every vLLM worker; all names start with ``hook_runtime_``."""

    hook_runtime_state: CaptureState | None = None

    def hook_runtime_install(self) -> dict[str, Any]:
        """Wrap the model once; ``{"error": reason, "kind": class}`` where that is refused."""
        worker: Any = self
        runner = worker.model_runner
        if self.hook_runtime_state is None:
            try:
                self.hook_runtime_state = CaptureState(worker.vllm_config, runner, worker.device)
            except HookRuntimeError as error:
                return {"error": str(error), "kind": type(error).__name__}
        state = self.hook_runtime_state
        return {
            "layers": sorted(state.geometry),
            "heads": [g.num_heads for _, g in sorted(state.geometry.items())],
            "kv_bytes": state.kv_bytes,
            "runner": f"{type(runner).__module__}.{type(runner).__name__}",
            "device": str(state.device.type),
            "dtype": str(state.dtype).removeprefix("torch."),
        }

    def hook_runtime_shadow(self, heads: list[list[int]]) -> int:
        """Hold these heads from now on; bytes of the shadow on this worker."""
        assert self.hook_runtime_state is not None
        return self.hook_runtime_state.shadow_heads([Head(*h) for h in heads])

    def hook_runtime_take(self, capture_ids: list[str]) -> list[dict[str, Any]]:
        """Finished captures in the order asked for."""
        assert self.hook_runtime_state is not None
        return self.hook_runtime_state.take(capture_ids)

    def hook_runtime_discard(self, capture_ids: list[str]) -> None:
        """Drop captures nobody will take."""
        assert self.hook_runtime_state is not None
        self.hook_runtime_state.discard(capture_ids)


def composed_name(user_extension: str) -> str:
    """Qualified name of this extension combined with the user's, for ``worker_extension_cls``."""
    return f"{__name__}.{_COMPOSED}{user_extension.encode().hex()}"


@functools.cache
def _composed(name: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    user = resolve_obj_by_qualname(bytes.fromhex(name.removeprefix(_COMPOSED)).decode())
    return type(name, (WorkerExtension, user), {})


def __getattr__(name: str) -> Any:
    if name.startswith(_COMPOSED):
        return _composed(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
