"""Every supported architecture as a tiny random model: all heads, chunks, windows, early exit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import DEFAULTS, TINY_CHUNK, start_engine
from oracle import reference_attention
from parity import assert_exact
from tiny_models import ARCHITECTURES

from hook_runtime.engine import HookLLM
from hook_runtime.errors import ProbeError, UnsupportedModelError
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("in_this_process")]

SPANS = ((4, 40), (40, 75), (80, 120))


def _prompt(tail: int, length: int) -> tuple[int, ...]:
    """Random tokens: the first 120 are the same in all, the rest depend on ``tail``."""
    shared = np.random.default_rng(0).integers(10, 40000, 120)
    own = np.random.default_rng(tail).integers(10, 40000, length - 120)
    return tuple(int(i) for i in (*shared, *own))


def _requests(num_heads: int) -> list[CaptureRequest]:
    """Longer than a chunk and than every window; rows on both sides of the chunk's end."""
    every = tuple(Head(layer, head) for layer in range(4) for head in range(num_heads))
    few = (Head(3, num_heads - 1), Head(0, 0), Head(2, 1))
    return [
        CaptureRequest(_prompt(1, 160), AttentionProbe(every, (123, 150), SPANS)),
        CaptureRequest(
            _prompt(2, TINY_CHUNK + 1), AttentionProbe(few, (122, 129), SPANS, "documents")
        ),
    ]


def test_matches_transformers(tiny: tuple[Path, HookLLM]) -> None:
    folder, engine = tiny
    requests = _requests(engine.model.num_heads)
    all_heads = CaptureRequest(
        _prompt(3, 126), AttentionProbe("all", (121, 124), SPANS, "documents")
    )
    expected = reference_attention(folder, [*requests, all_heads])
    assert_exact(engine.capture(requests[:1]), expected[:1], requests[:1])  # cold, in chunks
    assert_exact(engine.capture(requests), expected[:2], requests)  # repeated; and warm prefix
    again = engine.capture([requests[1], all_heads, requests[0]])
    assert_exact(
        again, [expected[1], expected[2], expected[0]], [requests[1], all_heads, requests[0]]
    )
    every = tuple(Head(i, h) for i in range(4) for h in range(engine.model.num_heads))
    assert again[1].heads == every


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_early_exit_gives_the_same_numbers(arch: str, tiny_model: Callable[[str], Path]) -> None:
    """Some name their layers' kinds in a list, which has to be cut as well."""
    folder = tiny_model(arch)
    heads = (Head(1, 2), Head(2, 3))
    prompt = _prompt(1, 160)
    request = CaptureRequest(prompt, AttentionProbe(heads, (123, 150), SPANS))
    arguments: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": TINY_CHUNK}
    with start_engine(folder, heads=heads, layers="auto", **arguments) as engine:
        assert (engine.model.layers_kept, engine.model.num_layers) == (3, 4)
        budget = DEFAULTS["kv_cache_memory_bytes"]  # for the cache and the shadow together
        assert 0.95 * budget < engine.kv_bytes + engine.shadow_bytes <= 1.001 * budget
        assert engine.shadow_bytes > 0.01 * budget
        for _ in range(2):
            assert_exact(
                engine.capture([request]), reference_attention(folder, [request]), [request]
            )
        with pytest.raises(UnsupportedModelError, match=r"keeps 3 of 4 layers.*layers=None"):
            engine.generate(["hello"])
        with pytest.raises(ProbeError, match="head 3-0 lies beyond the 3 layers kept of 4"):
            engine.capture([CaptureRequest(prompt, AttentionProbe((Head(3, 0),), (1, 2), SPANS))])
