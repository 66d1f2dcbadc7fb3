"""The engine that the session shares, and what it must give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import start_engine

from hook_runtime.engine import HookLLM


@pytest.fixture(scope="session")
def engine(smollm2_dir: Path) -> Iterator[HookLLM]:
    """SmolLM2 in float32 as vLLM runs it by default: compiled, prefix cache, chunked prefill."""
    with start_engine(smollm2_dir, name="smollm2") as hooked:
        yield hooked


@pytest.fixture
def cold_engine(engine: HookLLM) -> HookLLM:
    """The session's engine with an empty prefix cache."""
    assert engine.llm.reset_prefix_cache()
    return engine


@pytest.fixture(scope="session")
def reference(smollm2_dir: Path) -> Callable[[Any], list[Any]]:
    """Function from capture requests to what SmolLM2 must give in float32; remembers answers."""
    from oracle import reference_attention

    known: dict[Any, Any] = {}

    def answer(requests: Any) -> list[Any]:
        new = [r for r in dict.fromkeys(requests) if r not in known]
        known.update(zip(new, reference_attention(smollm2_dir, new) if new else [], strict=True))
        return [known[r] for r in requests]

    return answer
