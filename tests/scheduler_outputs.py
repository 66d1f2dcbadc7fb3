"""What vLLM's scheduler hands to the model runner, for tests of what follows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def new_request(
    name: str,
    tokens: int,
    blocks: list[int],
    computed: int = 0,
    *,
    extra: dict[str, Any] | None,
    mm_features: list[Any] | None = None,
    lora_request: Any = None,
) -> Any:
    """A request's first appearance; ``extra`` is what its sampling parameters carry for us."""
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=list(range(tokens)),
        mm_features=mm_features or [],
        sampling_params=SimpleNamespace(extra_args=extra),
        lora_request=lora_request,
        block_ids=(blocks,),
        num_computed_tokens=computed,
    )


def step(
    scheduled: dict[str, int],
    new_requests: tuple[Any, ...] = (),
    cached: tuple[tuple[str, list[int] | None, int, bool], ...] = (),
    finished: tuple[str, ...] = (),
    copies: list[tuple[int, int]] | None = None,
) -> Any:
    """One step; ``cached`` are requests seen before: name, new blocks, computed, resumed."""
    return SimpleNamespace(
        scheduled_new_reqs=list(new_requests),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[c[0] for c in cached],
            new_block_ids=[None if c[1] is None else (c[1],) for c in cached],
            num_computed_tokens=[c[2] for c in cached],
            resumed_req_ids={c[0] for c in cached if c[3]},
        ),
        num_scheduled_tokens=scheduled,
        finished_req_ids=set(finished),
        kv_cache_block_copies=copies,
    )
