"""Which documents share a prompt, and the prompts that result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .heads import Window
from .inputs import RerankInput
from .prompt import Prompt, PromptBuilder


@dataclass(frozen=True, slots=True)
class WindowPrompt:
    """One prompt, and for each of its documents the place in the caller's list."""

    places: tuple[int, ...]
    prompt: Prompt


def split_windows(places: Sequence[int], window: Window) -> list[tuple[int, ...]]:
    """Contiguous windows of at most ``window`` places, their sizes at most one apart.

    >>> split_windows(range(5), 2)
    [(0, 1), (2, 3), (4,)]
    """
    count = len(places)
    if not count:
        return []
    number = 1 if window == "all" else -(-count // window)
    size, larger = divmod(count, number)
    starts = [i * size + min(i, larger) for i in range(number + 1)]
    return [tuple(places[a:b]) for a, b in pairwise(starts)]


def plan_windows(
    given: RerankInput, builder: PromptBuilder, window: Window, reserve: int = 0
) -> tuple[WindowPrompt, ...]:
    """The prompts for one rerank. Blank documents, and those without tokens, are in none.

    ``reserve``: tokens that each prompt leaves free.
    """
    texts = [document.full_text for document in given.documents]
    segments = [builder.tokenize_document(text) if text.strip() else None for text in texts]
    kept = {i: s for i, s in enumerate(segments) if s is not None and s.tokens.ids}
    places = list(kept)
    asked = builder.tokenize(given.query)
    return tuple(
        WindowPrompt(
            chunk,
            builder.build(asked, [kept[i] for i in chunk], given.max_tokens_per_doc, reserve),
        )
        for chunk in split_windows(places, window)
    )
