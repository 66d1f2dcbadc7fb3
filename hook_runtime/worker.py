"""The worker the runtime gives vLLM: the platform's own, with remote procedures and memory set
aside for the shadow.

Arguments and results are plain lists, dicts, strings and bytes, so vLLM's default serialisation
carries them. ``Worker_<hex>`` names resolve to such a class; the hex says what it is made of, since
a class name is all that vLLM takes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

from . import (
    compat,
    loader,  # noqa: F401  registers the loaders in the worker's process
)
from .capture import CaptureState
from .compile_cache import name_compiled_model
from .errors import HookRuntimeError
from .memory import shadow_share
from .program_state import Doors, ProgramState
from .specs import Head

_PREFIX = "Worker_"


class HookMixin:
    """Goes before a vLLM worker class; all its own names start with ``hook_runtime_``."""

    hook_runtime_heads: tuple[Head, ...] = ()
    hook_runtime_programs: bool = False
    hook_runtime_state: CaptureState | None = None
    hook_runtime_doors: Doors | None = None
    hook_runtime_program_state: ProgramState | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """The worker's own, and the doors to the residual stream, before anything is compiled."""
        worker: Any = self
        name_compiled_model(worker.vllm_config, type(self))
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.hook_runtime_programs:
            self.hook_runtime_doors = Doors(worker.model_runner, worker.vllm_config, True)

    def determine_available_memory(self) -> int:
        """vLLM's figure for the KV cache, less what the shadow of the first heads takes beside it.

        Each byte of the cache comes with ``share`` bytes of shadow, so both fit together.
        """
        worker: Any = self
        available = super().determine_available_memory()  # type: ignore[misc]
        if not self.hook_runtime_heads or not available:
            return available
        specs = worker.get_kv_cache_spec()
        share = shadow_share(worker.vllm_config, specs, self.hook_runtime_heads)
        return int(available / (1 + share))

    def hook_runtime_install(self) -> dict[str, Any]:
        """Follow the model from now on; ``{"error": reason, "kind": class}`` where refused."""
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

    def _hook_runtime(self) -> CaptureState:
        assert self.hook_runtime_state is not None, "hook_runtime_install comes first"
        return self.hook_runtime_state

    def hook_runtime_shadow(self, heads: list[list[int]], share: float) -> dict[str, int]:
        """Hold these heads from now on: ``{"bytes": size}``.

        If that would take more than ``share`` of the free memory, nothing changes:
        ``{"needed": bytes, "free": bytes}``.
        """
        state, wanted = self._hook_runtime(), [Head(*h) for h in heads]
        needed, free = state.room(wanted)
        if needed > share * free:
            return {"needed": needed, "free": free}
        return {"bytes": state.shadow_heads(wanted)}

    def hook_runtime_open(self) -> dict[str, Any]:
        """Carry out programs from now on. ``refusal`` says why hidden states stay out of reach."""
        worker: Any = self
        runner, config = worker.model_runner, worker.vllm_config
        geometry = self._hook_runtime().geometry
        if self.hook_runtime_doors is None:
            self.hook_runtime_doors = Doors(runner, config, False)
        if self.hook_runtime_program_state is None:
            self.hook_runtime_program_state = ProgramState(
                config,
                runner,
                worker.device,
                geometry,
                self.hook_runtime_doors,
            )
        return {
            "refusal": self.hook_runtime_doors.refusal,
            "hidden_size": int(compat.hf_text_config(config).hidden_size),
            "head_dim": max(g.head_dim for g in geometry.values()),
        }

    def _hook_runtime_programs(self) -> ProgramState:
        assert self.hook_runtime_program_state is not None, "hook_runtime_open comes first"
        return self.hook_runtime_program_state

    def hook_runtime_hold(
        self, vectors: list[dict[str, Any]], drop: list[str], keep: list[str] | None
    ) -> None:
        """Hold vectors for programs; see ``ProgramState.hold``."""
        self._hook_runtime_programs().hold(vectors, drop, keep)

    def hook_runtime_states(self, asked: list[list[Any]], unwanted: list[str]) -> list[Any]:
        """What programs read, by ``[run id, end]``; see ``ProgramResults.take``."""
        results = self._hook_runtime_programs().results
        results.discard(unwanted)
        return results.take(asked)

    def hook_runtime_take(self, capture_ids: list[str], unwanted: list[str]) -> list[Any]:
        """Finished captures in the order asked for; what is unwanted is dropped."""
        results = self._hook_runtime().results
        results.discard(unwanted)
        return results.take(capture_ids)

    def hook_runtime_stats(self) -> dict[str, int]:
        """Sizes of everything the runtime keeps here; see ``CaptureState.stats``."""
        programs = self.hook_runtime_program_state
        return self._hook_runtime().stats() | (programs.stats() if programs else {})


def worker_name(user_worker: str | None, heads: Iterable[Head], programs: bool = False) -> str:
    """Qualified name of a worker that starts with room for ``heads``, for ``worker_cls``.

    ``programs`` opens the residual stream of a model that is compiled.
    """
    made_of = {"worker": user_worker, "heads": [list(h) for h in heads], "programs": programs}
    return f"{__name__}.{_PREFIX}{json.dumps(made_of).encode().hex()}"


@functools.cache
def _worker_class(name: str) -> type:
    made_of = json.loads(bytes.fromhex(name.removeprefix(_PREFIX)))
    base = compat.worker_class(made_of["worker"])
    heads = tuple(Head(*h) for h in made_of["heads"])
    return type(
        name,
        (HookMixin, base),
        {"hook_runtime_heads": heads, "hook_runtime_programs": made_of["programs"]},
    )


def __getattr__(name: str) -> Any:
    if name.startswith(_PREFIX):
        return _worker_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
