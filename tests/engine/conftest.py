"""The engine that the session shares, what it must give, and engines on tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import TINY_CHUNK, start_engine
from tiny_models import ARCHITECTURES

from hook_runtime.engine import HookLLM
from hook_runtime.specs import Head


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


@pytest.fixture
def new_head(cold_engine: HookLLM) -> Head:
    """A head that no test has asked the session's engine for."""
    model, held = cold_engine.model, cold_engine._session.held
    heads = (Head(i, h) for i in range(model.num_layers) for h in range(model.num_heads))
    return max(set(heads) - held)


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


@pytest.fixture(scope="module")
def in_this_process() -> Iterator[None]:
    """Engines without processes of their own start in a tenth of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield


@pytest.fixture(params=ARCHITECTURES)
def tiny(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    in_this_process: None,
) -> Iterator[tuple[Path, HookLLM]]:
    """Every architecture's tiny random checkpoint and an engine on it, in chunks."""
    folder = tiny_model(request.param)
    with start_engine(folder, enforce_eager=True, max_num_batched_tokens=TINY_CHUNK) as engine:
        yield folder, engine
