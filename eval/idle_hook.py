"""Times ordinary requests with the runtime's idle hook in place, taken out, and without it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .timing import Action, interleave

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM

IN_PLACE = "in place"
TAKEN_OUT = "taken out"


def idle_hook_seconds(
    hooked: HookLLM,
    unhooked: Mapping[str, Any],
    prompts: Any,
    params: Any,
    repeats: int,
    tick: Callable[[], object],
) -> dict[str, tuple[float, ...]]:
    """Seconds of each repeat of the same requests, by `IN_PLACE`, `TAKEN_OUT` and ``unhooked``.

    Two engines differ by more than the hook: where their memory lies, what else their processes
    wait for. So the hook is also taken out of ``hooked`` and put back.

    Args:
        hooked: an engine whose workers have `BenchWorker`'s methods.
        unhooked: engines without a hook, by name.
        prompts: of ``vllm.LLM.generate``.
        params: its sampling parameters.
        repeats: rounds after a warm-up.
        tick: called after every run, for a progress bar.
    """
    engines = {IN_PLACE: hooked.llm, TAKEN_OUT: hooked.llm, **unhooked}

    def reset(name: str, _: int) -> None:
        engines[name].reset_prefix_cache()
        if not all(hooked.llm.collective_rpc("bench_hook", args=(name != TAKEN_OUT,))):
            raise RuntimeError("the runtime's hook was not found in the workers.")

    def generate(engine: Any) -> Action:
        return lambda _: engine.generate(prompts, params, use_tqdm=False)

    seconds = interleave(
        {name: generate(engine) for name, engine in engines.items()},
        repeats,
        before=reset,
        after_each=tick,
    )
    hooked.llm.collective_rpc("bench_hook", args=(True,))
    return seconds
