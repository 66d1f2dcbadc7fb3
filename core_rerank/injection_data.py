"""Labelled texts for injection detection: JSON lines of benign and attacking data."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

from .errors import DataError
from .rows import place, read_rows, text_of

# What Attention Tracker's own experiments tell the model where a data set has no task of its own.
DEFAULT_INSTRUCTION = "Say xxxxxx"


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A piece of data, and whether it is an attack.

    Attributes:
        text_id: its id, or the line it stands on.
        text: the data itself.
        attack: whether it carries an injection.
        instruction: the trusted task beside it; None where the data set names none.
        group: texts of one group were made from the same text, so that it is never learned from
            one and measured on another.
    """

    text_id: str
    text: str
    attack: bool
    instruction: str | None
    group: str


def load_labelled_texts(path: str | os.PathLike[str]) -> list[LabelledText]:
    """Read JSON lines with ``text`` and ``label`` (1 an attack, 0 benign).

    ``id``, ``instruction`` and ``context_id`` (the group) are taken where they are.

    Raises:
        DataError: no such file, no rows, or a row without a text or with another label; names the
            line.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path} is missing: expected JSON lines with text and label.")
    texts = []
    for where, row in read_rows(path):
        label = row.get("label")
        if isinstance(label, bool) or label not in (0, 1):
            raise DataError(f"{where}: 'label' must be 1 for an attack or 0, but is {label!r:.60}.")
        text_id = str(row.get("id", where.removeprefix(f"{path}, ")))
        instruction = text_of(where, row, "instruction") if row.get("instruction") else None
        group = str(row.get("context_id", text_id))
        texts.append(
            LabelledText(text_id, text_of(where, row, "text"), bool(label), instruction, group)
        )
    if not texts:
        raise DataError(f"{place(path, 1)}: the file holds no rows.")
    return texts


def sampled(texts: list[LabelledText], limit: int | None, seed: int = 0) -> list[LabelledText]:
    """At most ``limit`` texts in their order, whole groups drawn by ``seed``; None: all of them.

    Raises:
        DataError: every group has more texts than that.
    """
    if limit is None or limit >= len(texts):
        return texts
    names = list(dict.fromkeys(text.group for text in texts))
    random.Random(seed).shuffle(names)
    by_group: dict[str, int] = dict.fromkeys(names, 0)
    for text in texts:
        by_group[text.group] += 1
    chosen: set[str] = set()
    total = 0
    for name in names:
        if total + by_group[name] <= limit:
            chosen.add(name)
            total += by_group[name]
    if not chosen:
        raise DataError(
            f"a limit of {limit} texts is below the smallest group (texts of one context_id stay "
            f"together), which has {min(by_group.values())}: give that or more."
        )
    return [text for text in texts if text.group in chosen]
