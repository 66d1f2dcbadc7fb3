"""Candidate lists with planted injections: copies of candidates that an attack was written into."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from core_rerank.errors import DataError
from core_rerank.labelled_queries import LabelledQuery
from core_rerank.prompt import PromptBuilder
from core_rerank.rows import read_rows
from core_rerank.types import Document

Place = Literal["start", "middle", "end"]
PLACES: tuple[Place, ...] = ("start", "middle", "end")


@dataclass(frozen=True, slots=True)
class PlantedDocument:
    """A candidate; ``attack`` is what was planted in it, and ``place`` where; None for a clean one.

    A planted copy is not relevant, whatever it was copied from: it is the attacker's.
    """

    document: Document
    relevant: bool
    place: Place | None = None
    attack: str | None = None

    @property
    def attack_end(self) -> int:
        """Where the attack ends in the document's whole text, in characters; 0 without one."""
        if self.attack is None:
            return 0
        return self.document.full_text.rindex(self.attack) + len(self.attack.rstrip())


@dataclass(frozen=True, slots=True)
class PlantedList:
    """A query with its clean candidates and, after them, one planted copy for each place."""

    query_id: str
    query: str
    documents: tuple[PlantedDocument, ...]


def read_attacks(path: Path) -> list[str]:
    """The different attacks of BIPIA-like rows, sorted."""
    return sorted({row["attack"] for _, row in read_rows(path) if row.get("attack")})


def plant(text: str, attack: str, place: Place) -> str:
    """``attack`` on a line of its own before or after ``text``, or between its middle sentences."""
    if place == "start":
        return f"{attack}\n{text}"
    if place == "end":
        return f"{text}\n{attack}"
    cuts = [i + 2 for i in range(len(text) - 2) if text[i : i + 2] == ". "]
    cuts = cuts or [i + 1 for i, letter in enumerate(text) if letter == " "] or [len(text)]
    middle = min(cuts, key=lambda cut: abs(cut - len(text) / 2))
    return f"{text[:middle]}{attack} {text[middle:]}"


def planted_lists(
    queries: Sequence[LabelledQuery], attacks: Sequence[str], seed: int = 0
) -> list[PlantedList]:
    """One planted copy of the first positive and two of negatives for each query, drawn by seed.

    Queries with fewer than two negatives are left out.

    Raises:
        DataError: there are no attacks, or no query is left.
    """
    if not attacks:
        raise DataError("there are no attacks to plant: give rows with a text as 'attack'.")
    lists = []
    for query in queries:
        if len(query.negatives) < len(PLACES) - 1:
            continue
        draw = random.Random(f"{seed} {query.query_id}")
        sources = [query.positives[0], *draw.sample(query.negatives, len(PLACES) - 1)]
        copies = [
            _copy(source, draw.choice(attacks), place)
            for source, place in zip(sources, draw.sample(PLACES, len(PLACES)), strict=True)
        ]
        clean = [PlantedDocument(d, d in query.positives) for d in query.positives]
        clean += [PlantedDocument(d, False) for d in query.negatives]
        lists.append(PlantedList(query.query_id, query.query, (*clean, *copies)))
    if not lists:
        raise DataError("no query has two negatives to plant attacks in: give more of them.")
    return lists


def without_cut_attacks(lists: Sequence[PlantedList], builder: PromptBuilder) -> list[PlantedList]:
    """The lists without the copies whose attack, or its end, does not come into the prompt."""

    def is_whole(query: str, item: PlantedDocument) -> bool:
        if item.attack is None:
            return True
        (offsets,) = builder.build(query, [item.document.full_text]).offsets
        return offsets[-1][1] >= item.attack_end

    return [
        replace(one, documents=tuple(d for d in one.documents if is_whole(one.query, d)))
        for one in lists
    ]


def _copy(source: Document, attack: str, place: Place) -> PlantedDocument:
    text = plant(source.text, attack, place)
    document = replace(source, doc_id=f"{source.doc_id}+{place}", text=text)
    return PlantedDocument(document, False, place, attack)
