"""The journal of a system: what a kill leaves, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core_rerank.errors import DataError
from core_rerank.eval.journal import Journal, Outcome
from core_rerank.eval.rivals.base import RankerResult

SETTINGS = {"depth": 5, "system": {"name": "core", "window": 1}}
IDS = ["q1", "q2", "q3", "q4", "q5"]
FACTS = {"device": "cpu"}


def outcome(query_id: str) -> Outcome:
    if query_id == "q3":
        return Outcome("q3", None, "PromptError: too long")
    number = int(query_id[1:])
    return Outcome(query_id, RankerResult((1, 0), (0.1 * number, 1 / 3), 0.25, 10, 0, 1))


def filled(path: Path, batches: int) -> Journal:
    journal = Journal(path, SETTINGS, IDS, 2)
    journal.begin(FACTS)
    for query_ids in journal.missing[:batches]:
        journal.add([outcome(query_id) for query_id in query_ids])
    return journal


def test_what_was_added_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    assert filled(path, 3).missing == []
    again = Journal(path, SETTINGS, IDS, 2)
    assert again.outcomes == [outcome(query_id) for query_id in IDS]
    assert again.facts == FACTS
    assert again.missing == []


def test_the_rest_comes_in_the_batches_of_one_run(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    filled(path, 1)
    assert Journal(path, SETTINGS, IDS, 2).missing == [["q3", "q4"], ["q5"]]


@pytest.mark.parametrize("lost", [1, 5, 60, 75])
def test_a_line_cut_short_takes_its_batch_with_it(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "core.jsonl"
    filled(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost])
    again = Journal(path, SETTINGS, IDS, 2)
    assert again.missing == [["q3", "q4"], ["q5"]]
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    again.begin(FACTS)
    again.add([outcome("q3"), outcome("q4")])
    assert path.read_bytes() == whole


def test_a_kill_before_the_engine_was_known_leaves_a_beginning(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    Journal(path, SETTINGS, IDS, 2)
    again = Journal(path, SETTINGS, IDS, 2)
    assert (again.facts, len(again.missing)) == (None, 3)


def test_other_settings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    filled(path, 1)
    other = {"depth": 7, "system": {"name": "core", "window": "all"}}
    with pytest.raises(DataError) as raised:
        Journal(path, other, IDS, 2)
    assert 'depth was 5, now 7; system.window was 1, now "all"' in str(raised.value)


def test_another_engine_is_named(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    filled(path, 1)
    with pytest.raises(DataError, match='device was "cpu", now "cuda"'):
        Journal(path, SETTINGS, IDS, 2).begin({"device": "cuda"})


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (1, '{"format": 9}', "no journal of this release"),
        (1, '{"format": 1, "hash": "0", "settings": {"depth": 7}}', "line 1 is damaged"),
        (2, '{"query": "q1"}', "line 2 is damaged"),
        (3, "{", "line 3 is damaged"),
        (3, json.dumps({"query": "q9", "error": ""}), "line 3 is damaged"),
        (4, json.dumps({"query": "q2", "order": [0]}), "line 4 is damaged"),
    ],
)
def test_damage_is_named(tmp_path: Path, line: int, text: str, message: str) -> None:
    path = tmp_path / "core.jsonl"
    filled(path, 2)
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=message):
        Journal(path, SETTINGS, IDS, 2)


def test_without_a_file_it_only_remembers() -> None:
    journal = Journal(None, SETTINGS, IDS, 4)
    journal.begin(FACTS)
    journal.add([outcome(query_id) for query_id in IDS[:4]])
    assert journal.missing == [["q5"]]
    with pytest.raises(ValueError, match="next batch"):
        journal.add([outcome("q1")])
