"""Programs' calls without an engine: what workers answer and requests give out."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hook_runtime import compat
from hook_runtime.interventions import AddVector
from hook_runtime.probes import HiddenStateProbe
from hook_runtime.programs import Program
from hook_runtime.specs import ModelInfo

MODEL = ModelInfo("tiny", None, 4, 4, 6, 512, "float32", "cpu", "vllm")
PROMPT = {"prompt_token_ids": [1, 2, 3, 4]}
GENERATED = [7, 8, 9]
READS = Program((HiddenStateProbe([1], positions="all"),))
STEERED = Program(READS.probes, AddVector([1], np.ones(2)))


def answers(method: str, arguments: Sequence[Any], failure: str | None = None) -> list[Any]:
    """One worker's, which carries everything out."""
    if method == "hook_runtime_open":
        return [{"refusal": None, "hidden_size": 2, "head_dim": 1}]
    if method == "hook_runtime_hold":
        return [None]
    asked, _ = arguments
    return [[{"error": failure} if failure else read(end) for _, end in asked]]


def read(end: int) -> dict[str, Any]:
    values = np.arange(2 * end, dtype=np.float32).reshape(1, end, 2)
    part = {"probe": 0, "keys": [1], "positions": [0, end], "shape": [1, end, 2]}
    return {"done": end, "read": [{**part, "dtype": "float32", "data": values.tobytes()}]}


def output(name: str, ids: list[int], finished: bool = True) -> Any:
    return SimpleNamespace(
        request_id=name,
        outputs=[SimpleNamespace(token_ids=ids)],
        prompt_token_ids=PROMPT["prompt_token_ids"],
        finished=finished,
    )


def params(kind: str = "cumulative") -> Any:
    return SimpleNamespace(n=1, extra_args=None, max_tokens=3, output_kind=kind)


def pretend_output_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's ``RequestOutputKind``, without vLLM."""
    kinds = SimpleNamespace(CUMULATIVE="cumulative", DELTA="delta")
    monkeypatch.setattr(compat, "symbol", lambda *_: kinds)
