"""The child process that owns engines: starts each scenario's, runs its conditions, reports."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hook_runtime.errors import HookRuntimeError

from .conditions import CONDITIONS
from .models import Models
from .scenarios import Scenario
from .session import NotMet, Observed, Session

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"kv_cache_memory_bytes": 256 << 20},
    # Tiny models: what an earlier engine of the process did not free must not keep one from
    # starting, as it would with vLLM's share of nine tenths.
    "gpu": {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.3},
}


def defaults(device: str) -> dict[str, Any]:
    """Engine arguments of every scenario that does not set them itself."""
    from engines import DEFAULTS as OF_THE_TESTS

    return {**OF_THE_TESTS, **DEFAULTS[device]}


@dataclass(slots=True)
class Started:
    """The scenario's engine runs; or it does not, with the reason."""

    runner: str = ""
    refused: str = ""
    failed: str = ""


@dataclass(slots=True)
class Tried:
    """What became of one condition."""

    condition: str
    observed: Observed = field(default_factory=Observed)
    not_met: str = ""
    failed: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Ended:
    """The scenario's last message."""


def serve(connection: Connection, models: Models, device: str, log: str) -> None:
    """Run the scenarios that arrive, one after the other, until the connection closes."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        try:
            scenario = connection.recv()
        except EOFError:
            return
        for message in _run(scenario, models, device):
            connection.send(message)
        connection.send(Ended())


def _run(scenario: Scenario, models: Models, device: str) -> Any:
    path = models.path(scenario.model)
    started, engine = _start(scenario, path, device)
    yield started
    if engine is None:
        return
    try:
        adapters = models.adapters(path) if scenario.arguments.get("enable_lora") else ()
        oracle = models.oracle(scenario.model, path)
        session = Session(engine, oracle, device, scenario.dtype_on(device), adapters)
        for name in scenario.conditions:
            if name in CONDITIONS:
                yield _try(name, session)
    finally:
        engine.close()
        _forget_engine(device)


def _start(scenario: Scenario, path: Path, device: str) -> tuple[Started, Any]:
    from engines import start_engine

    arguments = {
        **defaults(device),
        "dtype": scenario.dtype_on(device),
        **scenario.arguments,
    }
    try:
        engine = start_engine(path, **arguments)
    except HookRuntimeError as error:
        return Started(refused=f"{type(error).__name__}: {error}"), None
    except Exception as error:  # the table records it, and goes on with the other engines
        traceback.print_exc()
        return Started(failed=_one_line(error)), None
    return Started(runner=engine.runner), engine


def _try(name: str, session: Session) -> Tried:
    begun = time.monotonic()
    tried = Tried(name)
    try:
        tried.observed = CONDITIONS[name](session)
    except NotMet as reason:
        tried.not_met = str(reason)
    except Exception as error:  # likewise
        traceback.print_exc()
        tried.failed = _one_line(error)
    tried.seconds = time.monotonic() - begun
    return tried


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _forget_engine(device: str) -> None:
    """Give the memory of an engine in this process back before the next one starts."""
    import gc

    import torch

    gc.collect()
    if device == "gpu" and torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # after a CUDA fault nothing can be freed
            torch.cuda.empty_cache()
