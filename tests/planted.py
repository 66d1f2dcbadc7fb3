"""Labelled queries, and a backend in which one head looks at what the query repeats."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from core_rerank.labelled_queries import LabelledQuery
from core_rerank.types import Document
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

LAYERS, HEADS = 3, 2
PLANTED = Head(1, 1)


class PlantedBackend:
    """Head 1-1 looks at document tokens that the query repeats; every other head at length."""

    def __init__(self, tokenizer: Any, *, broken: bool = False, seconds: float = 0.0) -> None:
        """``seconds``: how long a call takes."""
        self.tokenizer = tokenizer
        self.broken = broken
        self.seconds = seconds
        self.calls = 0
        self.model = ModelInfo(
            name="some/model", revision="abc", num_layers=LAYERS, layers_kept=LAYERS,
            num_heads=HEADS, max_model_len=512, dtype="float32", device="cpu", backend="planted",
        )  # fmt: skip

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        self.calls += 1
        time.sleep(self.seconds)
        return [self._one(request) for request in requests]

    def _one(self, request: CaptureRequest) -> Capture:
        ids, probe = request.prompt_token_ids, request.probe
        assert probe.heads == "all"
        assert probe.reduction == "documents"
        asked = set(ids[slice(*probe.query_span)])
        values = np.zeros((LAYERS * HEADS, len(probe.spans)), np.float32)
        for column, (start, end) in enumerate(probe.spans):
            values[:, column] = (end - start) / 512
            hits = sum(token in asked for token in ids[start:end])
            values[PLANTED.layer * HEADS + PLANTED.head, column] = hits / 512
        if self.broken:
            values[0, 0] = np.nan
        heads = tuple(Head(i, h) for i in range(LAYERS) for h in range(HEADS))
        return Capture(heads, values)

    def close(self) -> None:
        pass


def labelled(count: int) -> list[LabelledQuery]:
    """Positives repeat the query's word and are short; negatives are longer and do not."""
    words = ("river", "mountain", "violin", "engine", "garden", "planet", "bridge", "castle")
    queries = []
    for number in range(count):
        word = words[number % len(words)]
        other = words[(number + 3) % len(words)]
        long = Document(f"A much longer text that tells of a {other}, a {other} and a {other}.")
        short = Document(f"the {word} is the {word}")
        noise = Document(f"nothing but some {other} stories were told here today")
        queries.append(LabelledQuery(f"q{number}", f"where is the {word}", (short,), (long, noise)))
    return queries
