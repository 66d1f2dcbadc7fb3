"""A reranker's settings, checked before anything is loaded: strategy, window, heads."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from hook_runtime.specs import Head

from .errors import HeadSetError
from .heads import HeadSet, Window, find_head_set
from .injection_heads import InjectionHeads, find_injection_heads
from .scoring import STRATEGIES, Strategy
from .screening import Screen
from .types import Explain, Screening


def check_strategy(name: str) -> Strategy:
    """The strategy called ``name``; ValueError names those there are."""
    if name not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {name!r}.")
    return STRATEGIES[name]


def check_window(window: object) -> Window:
    """``window`` as "all" or a whole number from 1; ValueError otherwise."""
    if window == "all":
        return "all"
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"window must be 'all' or a whole number of documents from 1, not {window!r}."
        )
    return window


def check_explain(explain: object) -> Explain:
    """``explain`` as True, False or "heads"; ValueError otherwise."""
    if explain == "heads":
        return "heads"
    if not isinstance(explain, bool):
        raise ValueError(f"explain must be True, False or 'heads', not {explain!r}.")
    return explain


def check_settings(calibrate: object, max_tokens_per_doc: object) -> None:
    """TypeError or ValueError unless they are True, False or None, and a count from 1."""
    if not (calibrate is None or isinstance(calibrate, bool)):
        raise TypeError(f"calibrate must be True, False or None, not {calibrate!r}.")
    if (
        isinstance(max_tokens_per_doc, bool)
        or not isinstance(max_tokens_per_doc, int)
        or max_tokens_per_doc < 1
    ):
        raise ValueError(
            f"max_tokens_per_doc must be a whole number from 1, not {max_tokens_per_doc!r}."
        )


def choose_head_set(
    heads: HeadSet | Iterable[object] | None,
    config: str | os.PathLike[str] | None,
    strategy: Strategy,
    model_id: str,
) -> HeadSet | None:
    """The head set in play: given, read from ``config``, or packaged for the model.

    None where the heads are a plain list, or where every head is read and none is packaged; for
    the latter a packaged set still recommends a window. HeadSetError if there should be one.
    """
    if heads is not None and config is not None:
        raise ValueError("heads and config both name the heads: give one of them.")
    if strategy.heads == "all" and (heads is not None or config is not None):
        raise ValueError(
            f"strategy {strategy.name!r} reads every head: leave out heads and config."
        )
    if heads is not None and not isinstance(heads, HeadSet):
        return None
    head_set = heads or (HeadSet.from_yaml(config) if config else find_head_set(model_id))
    if head_set is not None:
        head_set.check_model_id(model_id)
    elif strategy.heads == "selected":
        raise HeadSetError(
            f"no head set is known for {model_id}. Find its heads with `core-rerank detect-heads`, "
            "give some (heads=['15-7', ...] or config='heads.yaml'), or use strategy='icr', which "
            "reads every head."
        )
    return head_set


def choose_window(window: Window | None, head_set: HeadSet | None) -> Window:
    """``window``, or what the head set recommends; "all" without one."""
    if window is not None:
        return check_window(window)
    return head_set.window if head_set else "all"


def check_screening(screen: object) -> Screening:
    """``screen`` as True, False, "flag" or "drop"; ValueError otherwise."""
    if not (isinstance(screen, bool) or screen in ("flag", "drop")):
        raise ValueError(f"screen must be True, False, 'flag' or 'drop', not {screen!r}.")
    return screen  # type: ignore[return-value]


def screen_of_call(screen: object, own: Screen | None) -> Screen | None:
    """How one ranking is screened: as ``screen`` says, or as ``own`` does where that is None.

    Raises:
        ValueError: no such way to screen, or the reranker was made without a screen.
    """
    if screen is None:
        return own
    if not check_screening(screen):
        return None
    if own is None:
        raise ValueError(
            "this reranker does not screen: create it with screen=True, so that its engine holds "
            "the heads."
        )
    return replace(own, drop=screen == "drop")


def choose_screen(
    screen: object,
    heads: InjectionHeads | str | os.PathLike[str] | None,
    model_id: str,
    window: Window,
) -> Screen | None:
    """How to screen: ``screen`` with ``heads``, or with those packaged for the model.

    Raises:
        HeadSetError: there are none for the model, or they are another model's.
        ValueError: no such way to screen, heads without it, or a window other than 1.
    """
    if not check_screening(screen):
        if heads is not None:
            raise ValueError("screen_heads is only used when screening: give screen=True too.")
        return None
    if window != 1:
        raise ValueError(
            f"screen reads one document a prompt, as its heads were found, but the window is "
            f"{window!r}: give window=1."
        )
    if isinstance(heads, str | os.PathLike):
        heads = InjectionHeads.from_yaml(heads)
    heads = heads or find_injection_heads(model_id, "document")
    if heads is None:
        raise HeadSetError(
            f"no heads that screen documents are known for {model_id}: give some as screen_heads, "
            "or leave out screen."
        )
    heads.head_set.check_model_id(model_id)
    return Screen(heads, drop=screen == "drop")


def choose_calibration(calibrate: bool | None, head_set: HeadSet | None) -> bool:
    """``calibrate``, or what the head set that is read says; yes where there is none."""
    if calibrate is None:
        return head_set is None or head_set.calibrate
    return calibrate


def choose_heads(
    heads: HeadSet | Iterable[object] | None, head_set: HeadSet | None, strategy: Strategy
) -> tuple[Head, ...] | None:
    """The heads to read; None means every head. ValueError for an empty or repeating list."""
    if strategy.heads == "all":
        return None
    if head_set is not None:
        return head_set.heads
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise TypeError(f"heads must be a HeadSet or a list such as ['15-7'], not {heads!r}.")
    chosen = tuple(Head.parse(head) for head in heads)
    if not chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"heads must name at least one head, and none twice: {heads!r}.")
    return chosen
