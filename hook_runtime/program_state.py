"""The worker's side of programs: in the steps that compute their requests, reads and changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import compat
from .doors import OPERATION, Doorway, stand
from .errors import HookRuntimeError
from .follower import Follower, Stretch
from .geometry import LayerGeometry
from .program_results import ProgramResults
from .program_step import Step
from .programs import Program
from .vectors import Vector

logger = logging.getLogger(__name__)

MAX_PROGRAMS = 1000  # texts remembered with what they say


class Doors:
    """Whether this worker's residual stream can be reached, and how.

    A compiled model has its doors built in when it is loaded, if at all; in one that runs
    eagerly they stand only while a step needs them.
    """

    def __init__(self, model_runner: Any, vllm_config: Any, wanted: bool) -> None:
        """Comes after the model is loaded and before it is compiled."""
        self.doorway: Doorway | None = None
        self.refusal: str | None = None
        self.built_in = compat.is_compiled(vllm_config)
        if self.built_in and not wanted:
            self.refusal = (
                "this engine's model was compiled without doors to its residual stream. Create it "
                "with programs=True, or with enforce_eager=True."
            )
            return
        if compat.splits_tokens(vllm_config):
            self.refusal = "sequence parallelism (enable_sp) splits the residual stream."
            return
        try:
            self.doorway = Doorway(model_runner.get_model(), vllm_config)
        except HookRuntimeError as error:
            self.refusal = str(error)
            return
        if self.built_in:
            compat.cut_graphs_at(vllm_config, OPERATION)
            self.doorway.build()


class ProgramState:
    """One per worker. Lives on the model runner's ``execute_model``."""

    def __init__(
        self,
        vllm_config: Any,
        model_runner: Any,
        device: torch.device,
        geometry: Mapping[int, LayerGeometry],
        doors: Doors,
    ) -> None:
        self.device = device
        self.geometry = geometry
        self.doors = doors
        self.results = ProgramResults()
        self._follower = Follower(self._read)
        self._engine = compat.identity_of(vllm_config)
        self._vectors: dict[str, Vector] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._programs: dict[str, Program] = {}
        self._active = False
        self._wrap_step(model_runner)
        compat.keep_out_of_full_graphs(model_runner, lambda: self._active)

    # ------------------------------------------------------------ vectors held

    def hold(
        self,
        vectors: Sequence[Mapping[str, Any]],
        drop: Sequence[str],
        keep: Sequence[str] | None = None,
    ) -> None:
        """Hold these vectors (``Vector.to_wire``), and no longer those of the digests in ``drop``,
        or of any but those in ``keep``."""
        if keep is not None:
            drop = [*drop, *(self._vectors.keys() - set(keep))]
        for digest in drop:
            self._vectors.pop(digest, None)
            self._tensors.pop(digest, None)
        if drop:
            self._programs.clear()
        for data in vectors:
            vector = Vector.from_wire(data)
            self._vectors[vector.digest] = vector
            self._tensors[vector.digest] = torch.tensor(vector.values, device=self.device)

    def _tensor(self, vector: Vector) -> torch.Tensor:
        return self._tensors[vector.digest]

    def _read(self, text: str) -> Program:
        program = self._programs.get(text)
        if program is None:
            program = Program.from_wire(text, self._vectors)
            if len(self._programs) >= MAX_PROGRAMS:
                self._programs.clear()
            self._programs[text] = program
        return program

    # ------------------------------------------------------------ one step

    def _wrap_step(self, model_runner: Any) -> None:
        original = model_runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return original(scheduler_output, *args, **kwargs)
            step = self._begin(scheduler_output)
            if step is None:
                return original(scheduler_output, *args, **kwargs)
            self._active = True
            undo = self._open(step)
            try:
                result = original(scheduler_output, *args, **kwargs)
            finally:
                self._active = False
                for close in reversed(undo):
                    close()
            step.end()
            return result

        model_runner.execute_model = execute_model

    def _begin(self, output: Any) -> Step | None:
        try:
            stretches, refused = self._follower.step(output)
            for run_id, reason in refused:
                self.results.refuse(run_id, reason)
            for stretch in stretches:
                self.results.follow(stretch.run)
            if not stretches:
                return None
            return self._plan(stretches, output.total_num_scheduled_tokens)
        except Exception as error:  # ordinary requests go on; whoever runs a program is told
            logger.exception("the programs of this step could not be planned")
            for run in self._follower.abandon():
                run.fail(f"{type(error).__name__}: {error}")
            return None

    def _plan(self, stretches: list[Stretch], tokens: int) -> Step | None:
        doorway = self.doors.doorway
        if doorway is None:
            for stretch in stretches:
                if stretch.run.program.needs_doors:
                    stretch.run.fail(str(self.doors.refusal))
        step = Step(stretches, tokens, self.geometry, doorway, self._tensor)
        return step if step.busy else step.end()

    def _open(self, step: Step) -> list[Callable[[], None]]:
        """Put the step where it sees what it needs; what takes it away again."""
        undo: list[Callable[[], None]] = []
        if step.at_doors:
            undo.append(stand(self._engine, step.at_door))
            if not self.doors.built_in:
                assert self.doors.doorway is not None
                undo.extend(handle.remove for handle in self.doors.doorway.build())
        undo.extend(_wrap_attention(self.geometry[layer], step) for layer in step.at_heads)
        return undo

    def stats(self) -> dict[str, int]:
        """Programs followed, results kept, vectors held."""
        return {
            "programs": len(self._follower),
            "program_results": len(self.results),
            "vectors": len(self._vectors),
        }


def _wrap_attention(geometry: LayerGeometry, step: Step) -> Callable[[], None]:
    """Let the step see what one layer's heads give out until the returned function is called."""
    original = geometry.impl.forward

    def forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *a: Any, **k: Any
    ) -> Any:
        result = original(layer, query, key, value, cache, metadata, *a, **k)
        if metadata is not None:
            given = k.get("output", a[0] if a else None)
            step.at_attention(geometry, result if given is None else given)
        return result

    return geometry.stand_in(forward)
