"""Made-up documents and prompts of a known length for the benchmark: content does not matter."""

from __future__ import annotations

import random
from typing import Any

from hook_runtime.specs import AttentionProbe, CaptureRequest, Head, Span

WORDS = (
    "river iron market senate protein gene laser orbit violin harbour treaty glacier enzyme "
    "cotton signal bridge copper island engine winter letter museum forest planet doctor "
    "student village empire number garden window paper metal colour voice history science "
    "moves carries measures follows describes changes holds reaches builds divides covers "
    "the a an of in on with from under between after before old new large small early late"
)
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
    return CaptureRequest(tuple(ids), AttentionProbe(heads, (start, len(ids)), tuple(spans)))
