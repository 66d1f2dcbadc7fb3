"""The engine's side of programs: what the workers hold, what goes with a request, what came back.

Shared by the synchronous and the asynchronous engine; talks to nobody.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import memory
from .errors import ProbeError, ProgramError, UnsupportedVLLMError
from .follower import EXTRA_ARG
from .probes import HeadOutputProbe, HiddenStateProbe, StateProbe, States
from .programs import ModelShape, Program
from .specs import Head
from .vectors import Vector

MAX_VECTOR_BYTES = 256 << 20
MAX_CAPTURE_BYTES = 1 << 30
MAX_GENERATIONS = 10_000  # programs remembered by name that left a prefix cache
MAX_BATCH = 8192  # requests in one generate: bounds what the workers keep for one fetch


@dataclass(frozen=True, slots=True)
class Run:
    """A program under way in one request, under the id by which its results are fetched.

    ``salt`` keeps what it changes apart in the prefix cache; None where it changes nothing.
    """

    run_id: str
    program: Program
    prompt_len: int
    salt: str | None

    def end(self, generated: int) -> int:
        """First position not needed for so many generated tokens: the last is never computed."""
        return self.prompt_len + max(generated, 1) - 1


class Load(NamedTuple):
    """What ``hook_runtime_hold`` takes: vectors to hold from now on, digests to drop.

    ``keep`` is given where nobody knows what the workers hold: they drop all but these.
    """

    vectors: list[dict[str, Any]]
    drop: list[str]
    keep: list[str] | None = None


class Conductor:
    """One per engine.

    Attributes:
        shape: the model that programs are checked against.
        max_capture_bytes: the most that one call's probes may bring back.
    """

    def __init__(
        self, shape: ModelShape, opened: Sequence[Mapping[str, Any]], max_capture_bytes: int
    ) -> None:
        """``opened``: every worker's answer to ``hook_runtime_open``."""
        self.shape = shape
        self.max_capture_bytes = max_capture_bytes
        self._refusal = next((r["refusal"] for r in opened if r.get("refusal")), None)
        self._ids = itertools.count()
        self._held: OrderedDict[str, int] = OrderedDict()
        self._in_use: dict[str, int] = {}
        self._used: dict[str, Vector] = {}
        self._unknown = False
        self._generations = itertools.count(1)
        self._oldest = 0
        self._generation: dict[str, int] = {}

    # ------------------------------------------------------------ before it runs

    def resolve(self, program: Program) -> Program:
        """The program with its layers named.

        Raises:
            ProbeError: the model does not have what it names.
            UnsupportedVLLMError: it needs the residual stream, which this engine keeps closed.
        """
        if not isinstance(program, Program):
            raise ProbeError(f"expected a Program, not {type(program).__name__}.")
        if program.needs_doors and self._refusal is not None:
            raise UnsupportedVLLMError(
                f"the program reads or changes hidden states, but {self._refusal}"
            )
        return program.resolved(self.shape)

    def check_sizes(self, sizes: Iterable[int]) -> None:
        """Raise ProbeError where the probes of one call could bring back more than is allowed."""
        total = sum(sizes)
        if total > self.max_capture_bytes:
            raise ProbeError(
                f"what is to be read may take {memory.readable(total)}, and max_capture_bytes "
                f"allows {memory.readable(self.max_capture_bytes)}: read fewer layers or "
                "positions, use reduce='mean', run fewer prompts at once, save to files "
                "(save_to=...), or raise the limit."
            )

    def parts(self, sizes: Sequence[int]) -> list[range]:
        """Requests in batches of ``MAX_BATCH`` that bring back ``max_capture_bytes`` at most.

        Raises ProbeError where a single one could bring back more.
        """
        parts: list[range] = []
        start, total = 0, 0
        for i, size in enumerate(sizes):
            self.check_sizes([size])
            full = i - start == MAX_BATCH or total + size > self.max_capture_bytes
            if i > start and full:
                parts.append(range(start, i))
                start, total = i, 0
            total += size
        return [*parts, range(start, len(sizes))] if sizes else parts

    def load(self, programs: Iterable[Program]) -> Load:
        """What the workers must be told before these run; follow it with ``loaded``.

        Vectors that nobody used for longest go when they outgrow ``MAX_VECTOR_BYTES``.
        """
        wanted: dict[str, Vector] = {}
        for program in programs:
            wanted.update(program.vectors)
        if self._unknown:
            wanted.update(self._used)
        for digest in wanted:
            if digest in self._held:
                self._held.move_to_end(digest)
        missing = [v for d, v in wanted.items() if d not in self._held]
        size = sum(self._held.values()) + sum(v.nbytes for v in missing)
        drop = []
        if missing:
            for digest, nbytes in self._held.items():
                if size <= MAX_VECTOR_BYTES:
                    break
                if digest not in wanted and not self._in_use.get(digest):
                    drop.append(digest)
                    size -= nbytes
        keep = list(wanted) if self._unknown else None
        return Load([v.to_wire() for v in missing], drop, keep)

    def loaded(self, load: Load) -> None:
        """The workers did as ``load`` said."""
        for digest in load.drop:
            self._held.pop(digest, None)
        for vector in load.vectors:
            self._held[vector["digest"]] = len(vector["data"])
        if load.keep is not None:
            self._unknown = False

    def forget(self) -> None:
        """Nobody knows what the workers hold: everything is sent again, the rest dropped."""
        self._held.clear()
        self._unknown = True

    def begin(self, program: Program, prompt_len: int) -> Run:
        """A run of a resolved program; ``end_run`` it."""
        for digest, vector in program.vectors.items():
            self._in_use[digest] = self._in_use.get(digest, 0) + 1
            self._used[digest] = vector
        salt = program.salt(prompt_len)
        if salt is not None:
            salt = f"{salt}/{self._generation.get(program.digest, self._oldest)}"
        return Run(f"p{next(self._ids)}", program, prompt_len, salt)

    def again(self, run: Run) -> Run | None:
        """What a request computed once more must run: the same interventions, nothing to read."""
        if not run.program.interventions:
            return None
        program = Program((), run.program.interventions)
        return Run(f"p{next(self._ids)}", program, run.prompt_len, run.salt)

    def leave_cache(self, run: Run) -> None:
        """It failed, or nobody knows how it went: what it left in the prefix cache may be of an
        unchanged model, so its program uses another from now on."""
        if run.salt is None:
            return
        if len(self._generation) >= MAX_GENERATIONS:
            self._generation.clear()
            self._oldest = next(self._generations)
        self._generation[run.program.digest] = next(self._generations)

    def end_run(self, run: Run) -> None:
        """The run needs its vectors no more."""
        for digest in run.program.vectors:
            self._in_use[digest] -= 1
            if not self._in_use[digest]:
                del self._in_use[digest], self._used[digest]


def with_program(params: Any, run: Run) -> Any:
    """A copy of the sampling parameters that carries the run to the workers."""
    if params.n != 1:
        raise ProbeError(f"a request with a program must ask for one completion, not n={params.n}.")
    params = copy.copy(params)
    params.extra_args = {
        **(params.extra_args or {}),
        EXTRA_ARG: {"id": run.run_id, "program": run.program.wire, "salt": run.salt},
    }
    if run.program.reads_prompt(run.prompt_len):
        params.skip_reading_prefix_cache = True
    return params


def with_salt(prompt: Mapping[str, Any], run: Run) -> dict[str, Any]:
    """The prompt, apart in the prefix cache from those that other interventions change."""
    if run.salt is None:
        return dict(prompt)
    base = prompt.get("cache_salt") or "hook_runtime"
    return {**prompt, "cache_salt": f"{base}/program/{run.salt}"}


# ---------------------------------------------------------------- what came back


def states_of(ranks: Sequence[Mapping[str, Any]], run: Run, generated: int) -> tuple[States, ...]:
    """What each probe of the program read, in order, from every worker's answer.

    Raises:
        ProgramError: the program was not carried out whole; partial numbers never come back.
    """
    known = [rank for rank in ranks if rank]
    for rank in known:
        if "error" in rank:
            raise ProgramError(f"the program was not carried out: {rank['error']}.")
    end = run.end(generated)
    if not known or any(rank["done"] < end for rank in known):
        done = min((rank["done"] for rank in known), default=0)
        raise ProgramError(f"the program was carried out up to token {done} of {end} only.")
    return tuple(
        _merged(probe, [r for rank in known for r in rank["read"] if r["probe"] == i], run, end)
        for i, probe in enumerate(run.program.probes)
    )


def _merged(probe: StateProbe, parts: Sequence[Mapping[str, Any]], run: Run, end: int) -> States:
    reach = probe.reach(run.prompt_len)
    low, high = reach or (end, end)
    span = (min(low, end), end if high is None else min(high, end))
    wanted: Sequence[Any] = probe.heads if isinstance(probe, HeadOutputProbe) else ()
    if isinstance(probe, HiddenStateProbe):
        wanted = probe.layers
    if span[0] >= span[1]:
        width = parts[0]["shape"][-1] if parts else 0
        return States(probe, span, np.zeros((len(wanted), 0, width), np.float32))
    rows: dict[Any, np.ndarray] = {}
    for part in parts:
        if tuple(part["positions"]) != span:
            raise ProgramError(f"{probe.kind} read tokens {part['positions']}, not {list(span)}.")
        keys = [Head(*k) if isinstance(k, list | tuple) else k for k in part["keys"]]
        rows.update(zip(keys, _array(part), strict=True))
    missing = [str(key) for key in wanted if key not in rows]
    if missing:
        raise ProgramError(f"no worker read {probe.kind} {' '.join(missing)}.")
    return States(probe, span, np.stack([rows[key] for key in wanted]))


def _array(part: Mapping[str, Any]) -> np.ndarray:
    """float32, which holds every half-precision number exactly."""
    import torch

    values = torch.frombuffer(bytearray(part["data"]), dtype=getattr(torch, part["dtype"]))
    return values.reshape(part["shape"]).float().numpy()
