"""What every first stage offers: index a corpus, search it, return a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from core_rerank.types import Document

Run = dict[str, dict[str, float]]
"""Query id -> document id -> score; a higher score is better. Inner dicts are best first."""


class Retriever(Protocol):
    """A first stage: ``index`` once, then ``search``."""

    def index(self, corpus: Mapping[str, Document]) -> None:
        """Take in the corpus, by document id; replaces what was indexed before."""
        ...

    def search(self, queries: Mapping[str, str], depth: int, *, progress: bool = False) -> Run:
        """At most ``depth`` documents for each query, best first; every query is in the run."""
        ...
