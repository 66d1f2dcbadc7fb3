"""Prompts in the product's layout, spans exact by construction, for the runtime's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from hook_runtime.specs import AttentionProbe, CaptureRequest, Head, Reduction, Span

FACTS = (
    "The harbour of Valparaíso burned in 1843, and its wooden piers were rebuilt in iron.",
    "A barn owl hears a vole under thirty centimetres of snow and strikes without seeing it.",
    "Basalt columns form when a thick lava flow cools slowly and cracks into hexagons.",
    "The abacus stayed in Japanese banks long after electronic calculators had become cheap.",
    "Oat milk foams because its beta-glucans hold air bubbles between the proteins.",
    "Ada Lovelace described how an engine could compute Bernoulli numbers step by step.",
    "Mangrove roots filter salt and shelter young fish from larger predators.",
    "A quartz watch counts the vibrations of a crystal that beats 32,768 times a second.",
    "The Trans-Siberian railway crosses seven time zones between Moscow and Vladivostok.",
    "Yeast turns sugar into carbon dioxide, which makes the dough of a loaf rise.",
    "Tardigrades survive drying by replacing the water in their cells with sugars.",
    "Bronze is harder than copper because tin atoms keep the layers from sliding.",
)
QUERIES = (
    "What makes bread dough rise?",
    "Which bird hunts by hearing under snow?",
    "How do hexagonal rock columns form?",
    "How long is the railway to Vladivostok, and how many time zones does it cross?",
)
NULL_QUERY = "N/A"
HEADS = tuple(Head.parse(h) for h in ("5-1", "10-0", "10-4", "12-3", "15-7", "15-8", "20-2"))


def capture_request(
    tokenizer: Any,
    query: str,
    heads: Sequence[Head] = HEADS,
    *,
    documents: int = 8,
    seed: int = 0,
    reduction: Reduction = "tokens",
) -> CaptureRequest:
    """All documents first, the query last; ``seed`` chooses and orders the documents."""
    chosen = random.Random(seed).sample(FACTS, documents)
    ids = _encode(tokenizer, "<|im_start|>user\nHere are some paragraphs:\n\n")
    spans: list[Span] = []
    for number, text in enumerate(chosen, start=1):
        ids += _encode(tokenizer, f"[{number}] ")
        start = len(ids)
        ids += _encode(tokenizer, text)
        spans.append((start, len(ids)))
        ids += _encode(tokenizer, "\n\n")
    ids += _encode(tokenizer, "Find what is relevant to the query.\n\nQuery: ")
    start = len(ids)
    ids += _encode(tokenizer, query)
    query_span = (start, len(ids))
    ids += _encode(tokenizer, "<|im_end|>\n<|im_start|>assistant\n")
    probe = AttentionProbe(tuple(heads), query_span, tuple(spans), reduction)
    return CaptureRequest(tuple(ids), probe)


def random_request(
    length: int, query: Span, spans: Sequence[Span], heads: Any = "all", *, seed: int = 0
) -> CaptureRequest:
    """A prompt of random tokens; the same ``seed`` gives prompts that share their beginning."""
    ids = np.random.default_rng(seed).integers(10, 40000, size=length)
    return CaptureRequest(tuple(int(i) for i in ids), AttentionProbe(heads, query, tuple(spans)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
