"""Follows vLLM's scheduler for requests that carry a program: which tokens a step computes, where.

Only ``SchedulerOutput`` is read, and a token's row in the batch is found by its cache slot, so
every model runner looks the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from .compat import NULL_BLOCK
from .errors import ProbeError
from .programs import Program
from .results import Part

EXTRA_ARG = "hook_runtime_program"


class Piece(NamedTuple):
    """What a probe read in one step: rows ``offset..`` of a part, for positions start..stop.

    The part is [rows, width]; with ``reduce="mean"`` one row, the sum over the positions.
    """

    start: int
    stop: int
    part: Part
    offset: int


@dataclass(slots=True, eq=False)
class RunningProgram:
    """A running request with its program.

    Attributes:
        run_id: under which its results are fetched.
        key: equal for equal programs; those run together.
        done: every position before it was computed under the program, here or in a cached prefix.
        pieces: what was read, by (probe number, hidden state or head).
        read_until: by the same, the position up to which it was read: what a preempted request
            computes again is not read twice.
        announced: its results can be fetched.
        failure: why the program was not carried out, if so.
    """

    request_id: str
    run_id: str
    key: str
    program: Program
    prompt_len: int
    blocks: list[list[int]]
    done: int
    first: int
    pieces: dict[Any, list[Piece]] = field(default_factory=dict)
    read_until: dict[int, int] = field(default_factory=dict)
    announced: bool = False
    failure: str | None = None

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.pieces.clear()


class Stretch(NamedTuple):
    """Tokens ``start..stop`` of a request, computed in this step."""

    run: RunningProgram
    start: int
    stop: int

    def slots(self, group: int, block_size: int) -> np.ndarray:
        """Their cache slots; int64 [stop - start]. ProbeError where vLLM gave up the block."""
        positions = np.arange(self.start, self.stop)
        blocks = np.asarray(self.run.blocks[group], np.int64)[positions // block_size]
        if (blocks == NULL_BLOCK).any():
            raise ProbeError("the tokens of this step have no cache block")
        return blocks * block_size + positions % block_size


class Follower:
    """The requests with a program that run on this engine."""

    def __init__(self, read: Callable[[str], Program]) -> None:
        """``read`` turns the text that a request carries into its program."""
        self._read = read
        self._running: dict[str, RunningProgram] = {}

    def __len__(self) -> int:
        return len(self._running)

    def abandon(self) -> list[RunningProgram]:
        """Stop following every request; those that were followed."""
        followed = list(self._running.values())
        self._running.clear()
        return followed

    def step(self, output: Any) -> tuple[list[Stretch], list[tuple[str, str]]]:
        """Take in one ``SchedulerOutput``: stretches of this step; runs refused and why."""
        if self._running:
            for request_id in output.finished_req_ids:
                self._running.pop(request_id, None)
        stretches: list[Stretch] = []
        refused: list[tuple[str, str]] = []
        for new in output.scheduled_new_reqs:
            carried = _carried(new)
            if carried is None:
                continue
            before = self._running.pop(new.req_id, None)
            try:
                run = self._begin(new, carried, before)
            except (ProbeError, ValueError, TypeError) as error:
                refused.append((carried["id"], str(error)))
                continue
            self._running[new.req_id] = run
            stretches.append(_stretch(run, new.num_computed_tokens, output))
        if self._running:
            stretches.extend(self._continued(output))
        return stretches, refused

    def _begin(
        self, new: Any, carried: dict[str, str], before: RunningProgram | None
    ) -> RunningProgram:
        if new.prompt_token_ids is None or new.mm_features:
            raise ProbeError("a program needs a text prompt, given as text or token ids.")
        blocks = [list(ids) for ids in new.block_ids]
        if before is not None:  # resumed after a preemption, by the V2 runner
            before.blocks = blocks
            return before
        program = self._read(carried["program"])
        return RunningProgram(
            request_id=new.req_id,
            run_id=carried["id"],
            key=carried["program"],
            program=program,
            prompt_len=len(new.prompt_token_ids),
            blocks=blocks,
            done=new.num_computed_tokens,
            first=new.num_computed_tokens,
        )

    def _continued(self, output: Any) -> Iterator[Stretch]:
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            run = self._running.get(request_id)
            if run is None:
                continue
            new_blocks = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                run.blocks = [list(b) for b in new_blocks]
            elif new_blocks is not None:
                for held, added in zip(run.blocks, new_blocks, strict=True):
                    held.extend(added)
            yield _stretch(run, cached.num_computed_tokens[i], output)


def _stretch(run: RunningProgram, computed: int, output: Any) -> Stretch:
    if computed > run.done:
        run.fail(f"the scheduler skipped tokens {run.done} to {computed}")
    return Stretch(run, computed, computed + output.num_scheduled_tokens[run.request_id])


def _carried(new: Any) -> dict[str, str] | None:
    params = new.sampling_params
    found = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
    return found if isinstance(found, dict) and {"id", "program"} <= found.keys() else None


def rows_of(slots: np.ndarray, mapping: torch.Tensor) -> torch.Tensor:
    """The batch rows whose tokens are written to these cache slots; int64 [slots].

    ``mapping`` is the slot of every row. ProbeError where one is not in the batch.
    """
    wanted = torch.from_numpy(slots).to(mapping.device)
    ordered, rows = mapping.to(torch.int64).sort()
    places = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
    if not bool((ordered[places] == wanted).all()):
        raise ProbeError("a token of this step was not found in its batch")
    return rows[places]
