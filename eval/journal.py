"""A system's rankings on disk as they come, so that a run that was killed goes on.

    {"format": 1, "hash": "3f0c...", "settings": {...}}        everything that decides the rankings
    {"facts": {...}}                                           what the engine turned out to be
    {"query": "q1", "order": [2, 0, 1], "scores": [...], ...}  one line a query, in order
    {"query": "q2", "error": "PromptError: ..."}               a query that failed

The file is only added to, a batch of queries at a time. A line that a kill cut short, and the batch
it belongs to, are taken away when the file is opened again: the engine is then asked for just the
batches that one run would have asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from core_rerank.errors import DataError

from .files import differences, digest, to_json, write_whole
from .rivals.base import RankerResult

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one query: a result, or why there is none.

    ``result`` places refer to the query's candidates in the first stage's order.
    """

    query_id: str
    result: RankerResult | None
    error: str = ""


class Journal:
    """One system's outcomes; with ``path`` None in memory only.

    Attributes:
        outcomes: what is there, in the order of the queries.
        facts: what ``begin`` noted; None before.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], query_ids: Sequence[str], batch: int
    ) -> None:
        """Open or create the journal at ``path``.

        Args:
            path: the file.
            settings: everything that decides the rankings, as JSON.
            query_ids: the queries, in the order in which they are ranked.
            batch: queries ranked together.

        Raises:
            DataError: the file was made with other settings (names them), or is damaged.
        """
        self.path = path
        self.outcomes: list[Outcome] = []
        self.facts: dict[str, Any] | None = None
        self._query_ids = list(query_ids)
        self._batch = batch
        if path is None:
            return
        settings = json.loads(to_json(settings))
        if path.is_file() and b"\n" in path.read_bytes():
            self._load(path, settings)
        else:
            header = {"format": FORMAT, "hash": digest(settings), "settings": settings}
            write_whole(path, to_json(header) + "\n")

    @property
    def missing(self) -> list[list[str]]:
        """Ids of the queries that are still to be ranked, in batches."""
        size = self._batch
        waiting = range(len(self.outcomes), len(self._query_ids), size)
        return [self._query_ids[start : start + size] for start in waiting]

    def begin(self, facts: dict[str, Any]) -> None:
        """Note what the engine turned out to be; DataError if it was another before."""
        facts = json.loads(to_json(facts))
        if self.facts is None:
            self.facts = facts
            self._append([{"facts": facts}])
        elif told := differences(self.facts, facts):
            raise DataError(
                f"{self.path} was begun on another engine: {'; '.join(told)}. Go on where it was "
                "begun, or give another folder."
            )

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Add one batch; on disk when this returns."""
        expected = self._query_ids[len(self.outcomes) :][: self._batch]
        if [outcome.query_id for outcome in outcomes] != expected:
            raise ValueError(f"the next batch is {expected}, not these outcomes.")
        self._append([_row(outcome) for outcome in outcomes])
        self.outcomes += outcomes

    def _append(self, rows: Sequence[dict[str, Any]]) -> None:
        if self.path is None:
            return
        with self.path.open("ab") as file:
            file.write("".join(to_json(row) + "\n" for row in rows).encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())

    def _load(self, path: Path, settings: dict[str, Any]) -> None:
        lines = path.read_bytes().splitlines(keepends=True)
        if not lines[-1].endswith(b"\n"):
            lines.pop()  # cut short
        self._check_header(path, _parse(path, 1, lines[0]), settings)
        if len(lines) > 1:
            self.facts = _facts(path, _parse(path, 2, lines[1]))
        found = [
            _outcome(path, number, _parse(path, number, line), self._query_ids)
            for number, line in enumerate(lines[2:], start=3)
        ]
        complete = len(found) == len(self._query_ids)
        self.outcomes = found if complete else found[: len(found) // self._batch * self._batch]
        kept = lines[: 2 + len(self.outcomes)]
        os.truncate(path, sum(map(len, kept)))

    def _check_header(self, path: Path, header: dict[str, Any], settings: dict[str, Any]) -> None:
        there = header.get("settings")
        if header.get("format") != FORMAT or not isinstance(there, dict):
            raise DataError(f"{path} is no journal of this release: delete it to begin again.")
        if header.get("hash") != digest(there):
            raise _damaged(path, 1)
        if told := differences(there, settings):
            raise DataError(
                f"{path} was made with other settings: {'; '.join(told)}. Give the settings it "
                "was made with, or another folder."
            )


def _row(outcome: Outcome) -> dict[str, Any]:
    result = outcome.result
    if result is None:
        return {"query": outcome.query_id, "error": outcome.error}
    return {
        "query": outcome.query_id,
        "order": list(result.order),
        "scores": None if result.scores is None else list(result.scores),
        "seconds": result.seconds,
        "input_tokens": result.input_tokens,
        "output_tokens": result.output_tokens,
        "mended": result.failures,
    }


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise _damaged(path, number)
    return cast("dict[str, Any]", row)


def _facts(path: Path, row: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(row.get("facts"), dict):
        raise _damaged(path, 2)
    return row["facts"]


def _outcome(path: Path, number: int, row: dict[str, Any], query_ids: Sequence[str]) -> Outcome:
    place = number - 3
    try:
        if place >= len(query_ids) or row["query"] != query_ids[place]:
            raise _damaged(path, number)
        if "error" in row:
            return Outcome(row["query"], None, str(row["error"]))
        scores = row["scores"]
        result = RankerResult(
            tuple(row["order"]),
            None if scores is None else tuple(scores),
            row["seconds"],
            row["input_tokens"],
            row["output_tokens"],
            row["mended"],
        )
    except (KeyError, TypeError):
        raise _damaged(path, number) from None
    return Outcome(row["query"], result)


def _damaged(path: Path, number: int) -> DataError:
    return DataError(f"{path}, line {number} is damaged: delete the file to begin again.")
