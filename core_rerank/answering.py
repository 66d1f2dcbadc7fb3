"""The prompt that asks the model which ranked the documents for an answer from them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hook_runtime.backend import CaptureBackend, GeneratingBackend

from .inputs import RerankInput, check_count
from .prompt import PromptBuilder
from .windows import plan_windows


def answer_prompt(
    given: RerankInput,
    relevant: Collection[int],
    room: int,
    builder: PromptBuilder,
    backend: CaptureBackend,
) -> dict[str, Any]:
    """As `Reranker.answer_prompt`."""
    room = check_count("room", room)
    if not isinstance(backend, GeneratingBackend):
        raise TypeError(
            f"{type(backend).__name__} generates no text: use a vLLM backend, such as that of "
            "Reranker.from_llm(HookLLM(...))."
        )
    count = len(given.documents)
    wrong = [place for place in relevant if not 0 <= place < count]
    if wrong:
        raise ValueError(f"relevant names document {wrong[0]}, but there are {count} (from 0).")
    reserve = 0
    ids, left = _ask(given, relevant, builder, reserve)
    while left < room:  # what asks for an answer is longer, and cuts are of whole tokens each
        reserve += room - left
        ids, left = _ask(given, relevant, builder, reserve)
    return {"prompt_token_ids": list(ids), "cache_salt": backend.cache_salt}


def _ask(
    given: RerankInput, relevant: Collection[int], builder: PromptBuilder, reserve: int
) -> tuple[tuple[int, ...], int]:
    windows = plan_windows(given, builder, "all", reserve)
    if not windows:
        raise ValueError("there is no document with text to answer from.")
    labels = {place: label for label, place in enumerate(windows[0].places, 1)}
    named = [labels[place] for place in relevant if place in labels]
    return builder.answering(given.query, windows[0].prompt, named)
