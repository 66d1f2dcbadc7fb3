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

from .compat import NULL_BLOCK, extra_arg
from .errors import ProbeError
from .programs import Program
from .results import Part

EXTRA_ARG = "hook_runtime_program"
MAX_SPOILT = 10_000  # salts remembered; the engine's side uses new ones once it knows


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
        salt: of its prefix cache; None where the program changes nothing.
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
    salt: str | None = None

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
        self._arriving: list[str | None] = []
        self._spoilt: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def abandon(self) -> list[RunningProgram]:
        """Stop following every request; those that were followed."""
        followed = list(self._running.values())
        self._running.clear()
        for salt in (*self._arriving, *(run.salt for run in followed)):
            self._spoil(salt)
        return followed

    def step(self, output: Any) -> tuple[list[Stretch], list[tuple[str, str]]]:
        """Take in one ``SchedulerOutput``: stretches of this step; runs refused and why."""
        self._spoil_failed()
        if self._running:
            for request_id in output.finished_req_ids:
                self._running.pop(request_id, None)
        stretches: list[Stretch] = []
        refused: list[tuple[str, str]] = []
        arriving = [(n, c) for n in output.scheduled_new_reqs if (c := _carried(n)) is not None]
        self._arriving = [carried.get("salt") for _, carried in arriving]
        for new, carried in arriving:
            before = self._running.pop(new.req_id, None)
            try:
                run = self._begin(new, carried, before)
            except ProbeError as error:
                refused.append((carried["id"], str(error)))
                self._spoil(carried.get("salt"))
                continue
            self._running[new.req_id] = run
            stretches.append(_stretch(run, new.num_computed_tokens, output))
        if self._running:
            stretches.extend(self._continued(output))
            resumed = output.scheduled_cached_reqs.resumed_req_ids
            self._fail_spoilt(stretches, {new.req_id for new, _ in arriving} | set(resumed))
        return stretches, refused

    def _fail_spoilt(self, stretches: list[Stretch], entered: set[str]) -> None:
        """A cached prefix may be of a request whose program failed: computed without it."""
        self._spoil_failed()
        for run, start, _ in stretches:
            if start > 0 and run.request_id in entered and run.salt in self._spoilt:
                run.fail("its prefix was cached by a request whose program failed")

    def _spoil_failed(self) -> None:
        for run in self._running.values():
            if run.failure is not None:
                self._spoil(run.salt)

    def _spoil(self, salt: str | None) -> None:
        if salt is not None:
            self._spoilt[salt] = None
            if len(self._spoilt) > MAX_SPOILT:
                del self._spoilt[next(iter(self._spoilt))]

    def _begin(
        self, new: Any, carried: dict[str, Any], before: RunningProgram | None
    ) -> RunningProgram:
        if new.prompt_token_ids is None or new.mm_features:
            raise ProbeError("a program needs a text prompt, given as text or token ids.")
        blocks = [list(ids) for ids in new.block_ids]
        if before is not None:  # resumed after a preemption, by the V2 runner
            before.blocks = blocks
            return before
        try:
            program = self._read(carried["program"])
        except ProbeError:
            raise
        except Exception as error:  # another package's code may raise anything
            raise ProbeError(f"{type(error).__name__}: {error}") from error
        return RunningProgram(
            request_id=new.req_id,
            run_id=carried["id"],
            key=carried["program"],
            program=program,
            prompt_len=len(new.prompt_token_ids),
            blocks=blocks,
            done=new.num_computed_tokens,
            first=new.num_computed_tokens,
            salt=carried.get("salt"),
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


def _carried(new: Any) -> dict[str, Any] | None:
    found = extra_arg(new, EXTRA_ARG)
    return found if found is not None and {"id", "program"} <= found.keys() else None


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
