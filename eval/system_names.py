"""Systems by the names that the command line takes, as variants of one main system."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from core_rerank.fusion import Fusion
from core_rerank.heads import Window
from core_rerank.scoring import STRATEGIES
from core_rerank.settings import check_window

from .systems import (
    DEFAULT_CROSS_ENCODER,
    AttentionSystem,
    CrossEncoderSystem,
    FusedSystem,
    GenerationSystem,
    System,
    with_random_heads,
    with_strategy,
)

logger = logging.getLogger(__name__)

WINDOWS: dict[str, Window] = {"pointwise": 1, "listwise": "all"}
GRAMMAR = """\
core, qr, icr[:pointwise|listwise|N]   another strategy, or the same in another window
pointwise, listwise                    the main system with one, or all, documents in a prompt
random-heads[:SEED]                    the main system with as many random heads
cross-encoder[:MODEL]                  a sentence-transformers cross-encoder
rankgpt                                listwise generation by the same model on vLLM
fusion[:rrf|WEIGHT]                    the main system fused with the first stage"""


def name_systems(
    main: AttentionSystem, names: Iterable[str] = (), fusion: Fusion | None = None
) -> list[System | FusedSystem]:
    """``main`` and the systems to compare it with, in order.

    Names are those of ``GRAMMAR``; one that would only repeat an earlier system is left out,
    with a warning in the log.
    ``fusion`` adds to every reranker its fusion with the first stage.

    Raises:
        ValueError: no such system, or the main system has no such variant.
    """
    systems: list[System | FusedSystem] = [main, *(_variant(main, name) for name in names)]
    kept: dict[str, System | FusedSystem] = {}
    for system in systems:
        same = next((name for name, s in kept.items() if s.settings == system.settings), None)
        if same is None:
            kept.setdefault(system.name, system)
        else:
            logger.warning("%s is what %s is here, and is left out", system.name, same)
    if fusion is not None:
        for system in [s for s in kept.values() if not isinstance(s, FusedSystem)]:
            fused = _fused(system.name, fusion)
            kept.setdefault(fused.name, fused)
    return list(kept.values())


def _variant(main: AttentionSystem, text: str) -> System | FusedSystem:
    kind, _, rest = text.partition(":")
    if kind in STRATEGIES:
        return with_strategy(main, kind, _window(rest, main.window, text), text)
    if kind in WINDOWS and not rest:
        return with_strategy(main, main.strategy, WINDOWS[kind], kind)
    if kind == "random-heads":
        return with_random_heads(main, _seed(rest, text))
    if kind == "cross-encoder":
        return CrossEncoderSystem(text, rest or DEFAULT_CROSS_ENCODER)
    if kind == "rankgpt" and not rest:
        if main.backend != "vllm":
            raise ValueError(f"rankgpt generates on vLLM, not on {main.backend}: leave it out.")
        return GenerationSystem("rankgpt", main.model, main.engine)
    if kind == "fusion":
        return _fused(main.name, Fusion.parse(rest or "rrf"))
    raise ValueError(f"no system {text!r}. Systems are:\n{GRAMMAR}")


def _fused(name: str, fusion: Fusion) -> FusedSystem:
    return FusedSystem(f"{name}+{fusion}", name, fusion)


def _window(text: str, default: Window, spec: str) -> Window:
    if not text:
        return default
    if text in WINDOWS:
        return WINDOWS[text]
    if not text.isdecimal():
        raise ValueError(f"{spec!r}: the window must be pointwise, listwise or a number from 1.")
    return check_window(int(text))


def _seed(text: str, spec: str) -> int:
    if text and not text.isdecimal():
        raise ValueError(f"{spec!r}: the seed must be a whole number from 0.")
    return int(text or 0)
