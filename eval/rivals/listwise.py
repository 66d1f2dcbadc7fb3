"""Listwise reranking by generation: the model writes the order of a window of passages.

The method is RankGPT's (arXiv 2304.09542): windows of 20 passages slide from the bottom of the list
to its top in steps of 10, and the answer reads ``[3] > [1] > [2]``. The wording is our own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import RankerResult, Task

WINDOW = 20
STEP = 10
MAX_WORDS = 300
"""Words of a passage that the model reads, as published."""
SPARE_TOKENS = 16
MIN_PASSAGE_TOKENS = 8
_BRACKETED = re.compile(r"\[\s*([0-9]{1,6})\s*\]")
_BARE = re.compile(r"(?<![0-9])[0-9]{1,6}(?![0-9])")


def windows(count: int, size: int = WINDOW, step: int = STEP) -> list[tuple[int, int]]:
    """Half-open windows over ``count`` places, from the bottom up; the last begins at 0.

    >>> windows(40)
    [(20, 40), (10, 30), (0, 20)]
    """
    if not 0 < step <= size:
        raise ValueError(f"step must be between 1 and the window's size {size}, not {step}.")
    found, end = [], count
    while end > 0:
        start = max(0, end - size)
        found.append((start, end))
        end = 0 if start == 0 else end - step
    return found


def parse_order(answer: str, count: int) -> tuple[tuple[int, ...], bool]:
    """The order of ``count`` passages that an answer gives, from 0; and whether it was complete.

    Numbers that repeat or name no passage are left out, and passages that the answer does not name
    follow in the order they had: an answer in which that is needed is not complete. Numbers in
    brackets count; where there are none, bare ones do. What comes before ``</think>`` is no answer.
    """
    text = answer.rpartition("</think>")[2]
    numbers = [int(n) - 1 for n in _BRACKETED.findall(text) or _BARE.findall(text)]
    named = list(dict.fromkeys(n for n in numbers if 0 <= n < count))
    rest = [place for place in range(count) if place not in set(named)]
    return (*named, *rest), not rest and len(numbers) == count


def question(query: str, passages: Sequence[str]) -> str:
    """What the model is asked, as one user's message: some templates know no system role."""
    listed = "\n\n".join(f"[{number}] {text}" for number, text in enumerate(passages, start=1))
    count = len(passages)
    example = "[2] > [1]" if count > 1 else "[1]"
    return (
        f"You order passages by how relevant they are to a search query.\n\n"
        f"Search query: {query}\n\nBelow are {count} passages, each after its number in "
        f"brackets.\n\n{listed}\n\nSearch query: {query}\n\nOrder all {count} passages from the "
        f"most to the least relevant to the query. Answer with their numbers alone, in the form "
        f"{example}, and with nothing else."
    )


@dataclass(slots=True)
class _Sorting:
    """One query under way: the order so far, and what it has cost."""

    query: str
    documents: Sequence[str]
    waiting: list[tuple[int, int]]
    order: list[int] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    failures: int = 0

    @property
    def passages(self) -> list[str]:
        """Texts of the window that comes next, in the order so far."""
        start, stop = self.waiting[0]
        return [self.documents[place] for place in self.order[start:stop]]

    def take(self, answer: str, input_tokens: int, output_tokens: int) -> None:
        """Reorder the window by the model's answer, and go on to the next."""
        start, stop = self.waiting.pop(0)
        order, complete = parse_order(answer, stop - start)
        window = self.order[start:stop]
        self.order[start:stop] = [window[place] for place in order]
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens
        self.failures += not complete


class ListwiseRanker:
    """Sliding-window listwise generation, greedy, on a running engine.

    Args:
        engine: a HookLLM with all its layers, or any object with ``generate`` as ``vllm.LLM``'s.
        tokenizer: the model's Hugging Face tokenizer.
        max_model_len: tokens in a sequence, prompt and answer; passages are cut to fit.
        window, step: passages in a window, and how far it moves up.
    """

    name = "listwise generation"

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        max_model_len: int,
        window: int = WINDOW,
        step: int = STEP,
    ) -> None:
        windows(1, window, step)
        self._engine = engine
        self._tokenizer = tokenizer
        self._limit = max_model_len
        self._window = window
        self._step = step

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        """Order the documents of one query."""
        return self.rank_batch([(query, documents)])[0]

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        """All queries together: the first window of each in one batch, then the second.

        Raises:
            ValueError: a query is so long that no passage fits beside it.
        """
        start = time.perf_counter()
        sortings = [
            _Sorting(
                query,
                documents,
                windows(len(documents), self._window, self._step),
                list(range(len(documents))),
            )
            for query, documents in tasks
        ]
        while waiting := [sorting for sorting in sortings if sorting.waiting]:
            self._advance(waiting)
        seconds = (time.perf_counter() - start) / max(1, len(tasks))
        return [
            RankerResult(tuple(s.order), None, seconds, s.input_tokens, s.output_tokens, s.failures)
            for s in sortings
        ]

    def _advance(self, sortings: Sequence[_Sorting]) -> None:
        from vllm import SamplingParams

        prompts, params = [], []
        for sorting in sortings:
            passages = sorting.passages
            room = self._answer_tokens(len(passages))
            prompts.append({"prompt_token_ids": self._prompt(sorting.query, passages, room)})
            params.append(SamplingParams(max_tokens=room, temperature=0.0))
        outputs = self._engine.generate(prompts, params, use_tqdm=False)
        for sorting, output in zip(sortings, outputs, strict=True):
            answer = output.outputs[0]
            sorting.take(answer.text, len(output.prompt_token_ids), len(answer.token_ids))

    def _answer_tokens(self, count: int) -> int:
        """Tokens of a complete answer, and a few to spare."""
        answer = " > ".join(f"[{number}]" for number in range(1, count + 1))
        return len(self._tokenizer(answer, add_special_tokens=False)["input_ids"]) + SPARE_TOKENS

    def _prompt(self, query: str, passages: Sequence[str], room: int) -> list[int]:
        """Token ids; where they would not fit, every passage is cut to an equal share."""
        texts = [" ".join(text.split()[:MAX_WORDS]) for text in passages]
        ids = self._encode(query, texts)
        if len(ids) + room <= self._limit:
            return ids
        frame = len(self._encode(query, [""] * len(texts)))
        share = (self._limit - room - frame) // len(texts)
        while share >= MIN_PASSAGE_TOKENS:
            ids = self._encode(query, [self._cut(text, share) for text in texts])
            excess = len(ids) + room - self._limit
            if excess <= 0:
                return ids
            share -= -(-excess // len(texts))
        raise ValueError(
            f"{len(texts)} passages and a query of {len(query)} characters do not fit "
            f"{self._limit} tokens: give a smaller window, or a larger max_model_len."
        )

    def _cut(self, text: str, tokens: int) -> str:
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in encoded["offset_mapping"]]
        return text if len(ends) <= tokens else text[: ends[tokens - 1]]

    def _encode(self, query: str, texts: Sequence[str]) -> list[int]:
        asked = question(query, texts)
        if not self._tokenizer.chat_template:
            return list(self._tokenizer(f"{asked}\n\nOrder:")["input_ids"])
        rendered = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])
