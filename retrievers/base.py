"""What every first stage offers: index a corpus, search it, save and load the index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from .corpus import Corpus

Run = dict[str, dict[str, float]]
"""Query id -> document id -> score; a higher score is better. Inner dicts are best first."""


class Retriever(Protocol):
    """A first stage: ``index`` or ``load`` once, then ``search``."""

    @property
    def settings(self) -> dict[str, Any]:
        """What decides its rankings, besides the corpus, as JSON; kept in the saved index."""
        ...

    def index(self, corpus: Corpus, *, progress: bool = False) -> None:
        """Take in the corpus; replaces what was indexed before. Texts are not kept."""
        ...

    def search(self, queries: Mapping[str, str], depth: int, *, progress: bool = False) -> Run:
        """At most ``depth`` documents for each query, best first; every query is in the run."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the index to a folder, whole or not at all; replaces an index that is there."""
        ...

    def restore(self, folder: str | Path, corpus: Corpus | None = None) -> None:
        """Take over an index that ``save`` wrote, in place of ``index``.

        Refuses one that is damaged or was built with other settings and, if ``corpus`` is given
        (it is read through once), one of another corpus.
        """
        ...

    @classmethod
    def load(cls, folder: str | Path, corpus: Corpus | None = None) -> Self:
        """A new retriever with a saved index's settings, and that index; see ``restore``."""
        ...


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of core-rerank and of these distributions, for a saved index.

    ``"unknown"`` for one that came under another name (faiss has several).
    """
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("core-rerank", *packages):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
