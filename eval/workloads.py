"""Made-up documents and prompts of a known length for the benchmark: content does not matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hook_runtime.specs import AttentionProbe, CaptureRequest, Head, Span

WORDS = (
    "river iron market senate protein gene laser orbit violin harbour treaty glacier enzyme "
    "cotton signal bridge copper island engine winter letter museum forest planet doctor "
    "student village empire number garden window paper metal colour voice history science "
    "moves carries measures follows describes changes holds reaches builds divides covers "
    "the a an of in on with from under between after before old new large small early late"
)
# Tokens of a listwise prompt around its documents: opening, label and line breaks of a document,
# instruction, query, "N/A", and what ends the turn.
OPENING, LABEL, INSTRUCTION, QUERY, NULL, SUFFIX = 30, 6, 20, 20, 3, 8
QUERIES = (
    "Which treaty divided the island between the empires?",
    "How does the enzyme change the protein in winter?",
    "What did the museum write about the copper bridge?",
)


def document(words: int, seed: int) -> str:
    """``words`` words in sentences of twelve; the same ``seed`` gives the same text."""
    chosen = random.Random(seed).choices(WORDS.split(), k=words)
    sentences = [" ".join(chosen[i : i + 12]).capitalize() for i in range(0, words, 12)]
    return ". ".join(sentences) + "."


def text(tokenizer: Any, tokens: int, seed: int) -> str:
    """A `document` of about ``tokens`` tokens; exactly as many where its cut falls on a word."""
    words = document(tokens, seed)
    offsets = tokenizer(words, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in offsets["offset_mapping"]]
    return words[: ends[min(tokens, len(ends)) - 1]]


def token_ids(vocabulary: Sequence[int], count: int, seed: int) -> list[int]:
    """``count`` random tokens; the same ``seed`` gives the same ones."""
    return random.Random(seed).choices(vocabulary, k=count)


Pair = tuple[CaptureRequest, CaptureRequest]
"""A query's prompt and the same under the null query: what one listwise rerank captures."""


def pairs(
    vocabulary: Sequence[int],
    heads: tuple[Head, ...],
    queries: int,
    documents: int,
    tokens: int,
    seed: int = 0,
) -> list[Pair]:
    """Prompts of ``queries`` reranks of random token ids, laid out as `core_rerank.prompt` does.

    No two reranks share a document; the two prompts of a pair share everything before the query.
    """
    chance = random.Random(seed)

    def some(count: int) -> list[int]:
        return chance.choices(vocabulary, k=count)

    opening, instruction, null, suffix = map(some, (OPENING, INSTRUCTION, NULL, SUFFIX))
    made = []
    for _ in range(queries):
        start = list(opening)
        spans: list[Span] = []
        for _ in range(documents):
            start += some(LABEL)
            spans.append((len(start), len(start) + tokens))
            start += some(tokens)
        start += instruction
        query, calibration = (
            CaptureRequest(
                (*start, *rows, *suffix),
                AttentionProbe(
                    heads, (len(start), len(start) + len(rows)), tuple(spans), sum_heads=True
                ),
            )
            for rows in (some(QUERY), null)
        )
        made.append((query, calibration))
    return made


def requests(
    tokenizer: Any, heads: tuple[Head, ...], prompts: int, documents: int, words: int
) -> list[CaptureRequest]:
    """``prompts`` prompts of ``documents`` documents each and a query after them."""
    return [
        _request(tokenizer, heads, [document(words, 1000 * p + d) for d in range(documents)], p)
        for p in range(prompts)
    ]


def _request(
    tokenizer: Any, heads: tuple[Head, ...], texts: list[str], number: int
) -> CaptureRequest:
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    ids = encode("Here are some paragraphs:\n\n")
    spans: list[Span] = []
    for text in texts:
        start = len(ids)
        ids += encode(text)
        spans.append((start, len(ids)))
        ids += encode("\n\n")
    start = len(ids)
    ids += encode(QUERIES[number % len(QUERIES)])
    probe = AttentionProbe(heads, (start, len(ids)), tuple(spans), sum_heads=True)
    return CaptureRequest(tuple(ids), probe)
