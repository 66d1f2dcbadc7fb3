"""The programs of an engine by name, and what was read in its latest requests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .analyzers import Analyzer, Reading
from .config import ProgramConfig, load_config
from .errors import ProbeError
from .interventions import Intervention
from .programs import ModelShape, Program
from .templates import AttentionTemplate

MAX_READINGS = 10_000
CONFIG = "config"
"""Name of the program that an engine's ``config`` holds."""


class _Default:
    """Stands for the program that a call uses when it names none."""

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT = _Default()


class Plan(NamedTuple):
    """What one request is to run: a program, attention to read, and who looks at both."""

    program: Program | None = None
    attention: AttentionTemplate | None = None
    analyzer: Analyzer | None = None

    @property
    def empty(self) -> bool:
        return self.program is None and self.attention is None

    def with_program(self, more: Program) -> Plan:
        """This, and what another program reads and changes, after its own."""
        own = self.program or Program()
        both = Program(own.probes + more.probes, own.interventions + more.interventions)
        return self._replace(program=both)


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One loaded program, as `HookLLM.list_programs` gives it.

    Attributes:
        name: by which requests ask for it.
        default: requests of ``generate``, ``chat`` and ``perform`` that name no program run it.
        probes, interventions, analyzer: their types, in order.
        digest: equal for programs that do the same to the model.
    """

    name: str
    default: bool
    probes: tuple[str, ...]
    interventions: tuple[str, ...]
    analyzer: str | None
    digest: str


class Desk:
    """One per engine; talks to nobody."""

    def __init__(self, max_reading_bytes: int) -> None:
        """``max_reading_bytes``: what is kept for `analyze`; the oldest goes first."""
        self._max_bytes = max_reading_bytes
        self._plans: dict[str, Plan] = {}
        self._default: str | None = None
        self._readings: OrderedDict[str, tuple[Reading, Analyzer | None]] = OrderedDict()
        self._bytes = 0

    # ------------------------------------------------------------ programs by name

    def load(self, name: str, plan: Plan, default: bool) -> None:
        """Have the plan under this name, in place of what had it before."""
        if not isinstance(name, str) or not name:
            raise ProbeError(f"a program's name must be text, not {name!r}.")
        self._plans[name] = plan
        if default:
            self._default = name
        elif self._default == name:
            self._default = None

    def unload(self, name: str) -> None:
        """Forget the name; requests under way end as they began."""
        self._plan(name)
        del self._plans[name]
        if self._default == name:
            self._default = None

    def listed(self) -> list[ProgramInfo]:
        """What is loaded, by name."""
        found = []
        for name, plan in sorted(self._plans.items()):
            program = plan.program or Program()
            attention = (plan.attention.kind,) if plan.attention else ()
            found.append(
                ProgramInfo(
                    name,
                    name == self._default,
                    attention + tuple(p.kind for p in program.probes),
                    tuple(i.kind for i in program.interventions),
                    plan.analyzer.kind if plan.analyzer else None,
                    program.digest,
                )
            )
        return found

    def pick(self, given: Any, count: int, steer: Any = None) -> list[Plan]:
        """One plan a prompt, from a name, a program, None, or a list of these.

        ``steer``: an intervention or a program to carry out after it, None, or a list of these.
        """
        plans = [self._one(g) for g in _one_each(given, count, "programs")]
        steering = [_steering(s) for s in _one_each(steer, count, "of steer")]
        return [
            plan if more is None else plan.with_program(more)
            for plan, more in zip(plans, steering, strict=True)
        ]

    def _one(self, given: Any) -> Plan:
        if given is DEFAULT:
            return self._plans[self._default] if self._default else Plan()
        if given is None:
            return Plan()
        if isinstance(given, str):
            return self._plan(given)
        if isinstance(given, Program):
            return Plan(given)
        raise ProbeError(
            f"a program must be a Program, the name of a loaded one, or None, not {given!r:.80}."
        )

    def _plan(self, name: str) -> Plan:
        if name not in self._plans:
            names = ", ".join(sorted(self._plans)) or "none"
            raise ProbeError(f"there is no program {name!r}; loaded are: {names}.")
        return self._plans[name]

    # ------------------------------------------------------------ readings

    def keep(self, readings: Iterable[tuple[Reading, Analyzer | None]]) -> None:
        """Remember what was just read."""
        for reading, analyzer in readings:
            self._drop(reading.request_id)
            self._readings[reading.request_id] = (reading, analyzer)
            self._bytes += _size(reading)
        while len(self._readings) > MAX_READINGS or (
            self._bytes > self._max_bytes and len(self._readings) > 1
        ):
            self._drop(next(iter(self._readings)))

    def _drop(self, request_id: str) -> None:
        found = self._readings.pop(request_id, None)
        if found is not None:
            self._bytes -= _size(found[0])

    def reading(self, request_id: str) -> tuple[Reading, Analyzer | None]:
        """What was read in a request, and the analyzer of its program."""
        try:
            return self._readings[request_id]
        except KeyError:
            raise ProbeError(
                f"nothing is known of request {request_id!r}: it ran without a program, or it was "
                "too long ago."
            ) from None

    def analyze(self, request_ids: Iterable[str], analyzer: Analyzer | None) -> list[Any]:
        """What the analyzer, or by default that of each request's program, makes of them."""
        found = []
        for request_id in request_ids:
            reading, own = self.reading(request_id)
            chosen = analyzer or own
            if chosen is None:
                raise ProbeError(
                    f"the program of request {request_id!r} has no analyzer: give one."
                )
            found.append(chosen.analyze(reading))
        return found


def _one_each(given: Any, count: int, what: str) -> list[Any]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        return [given] * count
    if len(given) != count:
        raise ProbeError(f"{count} prompts but {len(given)} {what}: give one each.")
    return list(given)


def _steering(given: Any) -> Program | None:
    if given is None or isinstance(given, Program):
        return given
    if isinstance(given, Intervention):
        return Program((), (given,))
    raise ProbeError(
        f"steer must be an intervention, a Program, or None, not {given!r:.80}: of a steering "
        "vector, what its scaled(...) or projected() gives."
    )


def _size(reading: Reading) -> int:
    attention = reading.attention.values.nbytes if reading.attention else 0
    return attention + sum(s.values.nbytes for s in reading.states)


def plan_of(what: Any, shape: ModelShape) -> Plan:
    """A `Program`, a config or its path, as a plan; ProbeError where the model lacks something.

    A config's model is not compared with the one that runs: it may be known by another path.
    """
    if isinstance(what, Program):
        plan = Plan(what)
    elif isinstance(what, str | Path | ProgramConfig):
        found = what if isinstance(what, ProgramConfig) else load_config(what)
        empty = not (found.program.probes or found.program.interventions)
        plan = Plan(None if empty else found.program, found.attention, found.analyzer)
    else:
        raise ProbeError(f"expected a Program or the path of a config, not {what!r:.80}.")
    if plan.program is not None:
        plan.program.resolved(shape)
    if plan.attention is not None and plan.attention.heads != "all":
        shape.model.check_heads(plan.attention.heads)
    return plan


def configured(
    model: str | None, config: str | Path | None, programs: bool | None, engine: dict[str, Any]
) -> tuple[str, bool]:
    """The model to start and whether with doors, from an engine's arguments and its config.

    ``engine`` is completed by the config's revision where the config names the model.
    """
    if config is None:
        if model is None:
            raise ProbeError("no model was named: give one, or a config that does.")
        return model, bool(programs)
    found = load_config(config)
    if model is None and found.revision is not None:
        engine.setdefault("revision", found.revision)
    doors = found.program.needs_doors if programs is None else programs
    return model or found.model, doors
