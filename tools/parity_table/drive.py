"""Runs scenarios one after the other in child processes, and turns their messages into rows."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .judge import Oracle
from .models import Models
from .scenarios import Scenario
from .session import Part
from .table import Row, runner_name
from .worker_process import Ended, Started, Tried, serve

PATIENCE = 8
PATIENCE_S = {"cpu": 300.0, "gpu": 120.0}
"""A message is waited for 8 times as long as the whole scenario should take, and at least so many
seconds."""
VLLM_REFUSALS = ("ValueError", "ValidationError", "NotImplementedError")
"""What vLLM raises on a model or option it has no kernel for."""
UNJUDGED = "not run: captured, but not compared"
PROCESS_S = {"cpu": 8, "gpu": 20}
"""What a new process costs before its first engine starts."""


@dataclass(slots=True)
class Child:
    """A process that owns engines, alone in a process group of its own."""

    kind: tuple[Any, ...]
    process: Any
    connection: Any
    log: Path

    def kill(self) -> None:
        """End it and all that it started."""
        self.connection.close()
        self.process.join(timeout=20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # one that hangs before it has a group of its own
        self.process.join()

    def tail(self) -> str:
        """The last line of its log that says something of an error."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        telling = [line for line in lines if "Error" in line or "fault" in line.lower()]
        return " ".join((telling or lines or [""])[-1].split())[:400]


@dataclass(slots=True)
class Driver:
    """Where the table runs: ``device`` "cpu" or "gpu" with ``gpus`` of them.

    A context manager: leaving it ends the child process.
    """

    models: Models
    device: str
    gpus: int
    budget_s: float
    root: Path
    stamp: Mapping[str, str]
    begun: float = field(default_factory=time.monotonic)
    oracle: Oracle = field(init=False)
    _child: Child | None = None
    _logs: int = 0

    def __post_init__(self) -> None:
        self.oracle = Oracle(self.device)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(
        self, jobs: Sequence[tuple[Scenario, list[Row]]], wrote: Callable[[], None] = lambda: None
    ) -> None:
        """Fill in the rows of every job; ``wrote`` is called after each engine."""
        from tqdm import tqdm

        with ThreadPoolExecutor(max_workers=1) as judging:  # while the next engine starts
            judged = []
            for scenario, rows in tqdm(jobs, desc="parity", unit="engine", disable=len(jobs) < 2):
                reason = self._obstacle(scenario)
                if reason:
                    for row in rows:
                        row.verdict = f"not run: {reason}"
                    wrote()
                else:
                    parts = self._scenario(scenario, rows)
                    judged.append(judging.submit(self._judge, scenario, rows, parts, wrote))
            for done in judged:
                done.result()

    def _obstacle(self, scenario: Scenario) -> str:
        """Why the scenario cannot run here and now, if so."""
        seconds = scenario.seconds_on(self.device)
        if seconds is None:
            return scenario.absent
        if self.device == "gpu" and scenario.gpus > self.gpus:
            return f"needs {scenario.gpus} GPUs, {self.gpus} here"
        if self._child is None or self._child.kind != scenario.process():
            seconds += PROCESS_S[self.device]
        if time.monotonic() - self.begun + seconds > self.budget_s:
            return "budget"
        return self.models.missing(scenario.model)

    # ------------------------------------------------------------ one scenario

    def _scenario(self, scenario: Scenario, rows: list[Row]) -> dict[str, list[Part]]:
        """Settle the rows but for their figures; the captures to be judged, by condition."""
        begun = time.monotonic()
        broken = False
        left = {row.condition: row for row in rows}
        for row in rows:
            row.date, row.commit = self.stamp["date"], self.stamp["commit"]
        parts: dict[str, list[Part]] = {}
        for message in self._messages(scenario, list(left)):
            broken = broken or bool(getattr(message, "failed", ""))
            if isinstance(message, Started):
                _record_start(message, scenario, left)
            elif isinstance(message, Tried):
                row = left.pop(message.condition)
                parts[row.condition] = _record(message, row)
            else:
                for row in left.values():
                    row.verdict = message
                left.clear()
        if broken:
            self._stop()  # after a CUDA fault, say, no engine would run in this process any more
        for row in rows:
            row.engine_seconds = round(time.monotonic() - begun, 1)
        return parts

    def _judge(
        self,
        scenario: Scenario,
        rows: list[Row],
        parts: Mapping[str, list[Part]],
        wrote: Callable[[], None],
    ) -> None:
        """Compare with the oracle; what plain rounding does is taken over the whole engine."""
        from tqdm import tqdm

        dtype = scenario.dtype_on(self.device)
        plain = self.oracle.plain_error([p for found in parts.values() for p in found], dtype)
        for row in rows:
            found = parts.get(row.condition)
            if not found:
                continue
            fault = self.oracle.misfit(found)
            if not fault:
                row.figures = self.oracle.figures(found, dtype, plain)
                fault = row.figures.fault()
            if fault and row.verdict == UNJUDGED:
                row.verdict = f"failed: {fault}"
            elif row.verdict == UNJUDGED:
                row.verdict = "ok"
        verdicts = ", ".join(f"{r.condition} {r.verdict}" for r in rows)
        tqdm.write(f"{scenario.name}: {verdicts} ({rows[0].engine_seconds:.0f} s)")
        wrote()

    def _messages(self, scenario: Scenario, conditions: list[str]) -> Iterator[Any]:
        """What the child says of the scenario; last a verdict, where it died or hung."""
        child = self._child_for(scenario)
        patience = max(PATIENCE_S[self.device], PATIENCE * (scenario.seconds_on(self.device) or 0))
        asked = Scenario(**{**_fields(scenario), "conditions": tuple(conditions)})
        try:
            child.connection.send(asked)
            while child.connection.poll(patience):
                message = child.connection.recv()
                if isinstance(message, Ended):
                    return
                yield message
        except (EOFError, OSError):
            self._stop()
            yield f"failed: the engine's process died: {child.tail()}"
        else:
            self._stop()
            yield f"failed: no answer within {patience:.0f} s: {child.tail()}"

    # ------------------------------------------------------------ the child

    def _child_for(self, scenario: Scenario) -> Child:
        if self._child is not None and self._child.kind == scenario.process():
            return self._child
        self._stop()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self._logs += 1
        log = self.models.folder / f"engines-{self._logs}.log"
        log.touch()
        process = context.Process(target=serve, args=(theirs, self.models, self.device, str(log)))
        with _environment(self._variables(scenario)):
            process.start()
        theirs.close()
        self._child = Child(scenario.process(), process, ours, log)
        return self._child

    def _variables(self, scenario: Scenario) -> dict[str, str]:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if scenario.in_process else "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            **scenario.environment,
        }
        if self.device == "cpu" and variables.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
            helper = self.root / "tests" / "engine" / "v2_on_cpu"
            paths = [str(helper), os.environ.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
        return variables

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None


def _record_start(message: Started, scenario: Scenario, left: dict[str, Row]) -> None:
    """Where the engine did not start, or should not have, its rows are settled here."""
    for row in left.values():
        row.runner = runner_name(message.runner)
    if message.failed:
        by_vllm = scenario.refusal == "may" and message.failed.startswith(VLLM_REFUSALS)
        verdict = f"{'refused: by vLLM' if by_vllm else 'failed'}: {message.failed}"
    elif message.refused:
        kind = "failed: refused" if scenario.refusal == "never" else "refused"
        verdict = f"{kind}: {message.refused}"
    elif scenario.refusal == "must":
        verdict = "failed: it started, though it must be refused"
    else:
        return
    for row in left.values():
        row.verdict = verdict
    left.clear()


def _record(message: Tried, row: Row) -> list[Part]:
    """Settle the row but for its figures; the captures that these come from."""
    seen = message.observed
    row.seconds = round(message.seconds, 2)
    row.notes = seen.notes
    row.recomputed = sum(p.capture.recomputed for p in seen.parts)
    row.cached_tokens = sum(p.capture.cached_tokens for p in seen.parts)
    if message.failed:
        row.verdict = f"failed: {message.failed}"
    elif message.not_met:
        row.verdict = f"not run: the condition did not arise: {message.not_met}"
    elif seen.problems:
        row.verdict = f"failed: {'; '.join(seen.problems)}"
    elif not seen.parts:
        row.verdict = "failed: nothing was captured"
    else:
        row.verdict = UNJUDGED
    return seen.parts


def _fields(scenario: Scenario) -> dict[str, Any]:
    return {name: getattr(scenario, name) for name in Scenario.__slots__}  # type: ignore[attr-defined]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that a child process starts with; vLLM reads them when it is imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
