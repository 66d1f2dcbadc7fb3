"""Documents and rankings as values: immutable sequences, JSON-safe copies."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core_rerank import Document, RankedDocument, Ranking, TokenScore


def ranking(*documents: Document) -> Ranking:
    items = tuple(
        RankedDocument(index, d.doc_id, 1.0 - index, index + 1, d)
        for index, d in enumerate(documents)
    )
    return Ranking("query", items, "model", "core")


def test_the_readme_names_every_field_of_a_ranked_document() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    fields = ", ".join(field.name for field in dataclasses.fields(RankedDocument))
    assert f"`RankedDocument({fields})`" in text
    assert "`Ranking.dropped`" in text
    assert '`explain="heads"`' in text


def test_full_text() -> None:
    assert Document("text").full_text == "text"
    assert Document("text", title="title").full_text == "title\ntext"
    assert Document("text", title="").full_text == "text"


def test_a_ranking_is_an_immutable_sequence() -> None:
    value = ranking(Document("a"), Document("b"), Document("c"))
    assert len(value) == 3
    assert value[0].document.text == "a"
    assert value[-1].rank == 3
    assert [item.rank for item in value[:2]] == [1, 2]
    assert [item.document.text for item in value] == ["a", "b", "c"]
    assert value[1] in value
    assert next(reversed(value)) is value[2]
    with pytest.raises(TypeError):
        value[0] = value[1]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        value.query = "other"  # type: ignore[misc]
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value
    assert len({value, copy.copy(value)}) == 1


def test_to_dict() -> None:
    token = TokenScore("a", 0, 1, 0.5, False)
    item = RankedDocument(
        3, 7, -0.5, 1, Document("a", title="t"), truncated=True, token_scores=(token,)
    )
    value = Ranking("q", (item,), "m", "icr").to_dict()
    assert value == {
        "query": "q",
        "model": "m",
        "strategy": "icr",
        "documents": [
            {
                "rank": 1,
                "index": 3,
                "doc_id": 7,
                "score": -0.5,
                "title": "t",
                "text": "a",
                "metadata": {},
                "truncated": True,
                "blank": False,
                "token_scores": [{"text": "a", "start": 0, "end": 1, "score": 0.5, "kept": False}],
            }
        ],
    }
    assert json.loads(json.dumps(value)) == value


class Name(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (True, True),
        (np.bool_(False), False),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([[1, 2]]), [[1, 2]]),
        (float("nan"), "nan"),
        (np.float64("-inf"), "-inf"),
        ((1, "a"), [1, "a"]),
        ({1}, [1]),
        ({"a": {2: b"x"}}, {"a": {"2": "b'x'"}}),
        (datetime.date(2024, 7, 26), "2024-07-26"),
        (Name("name"), "name"),
        (10**30, 10**30),
    ],
)
def test_metadata_becomes_json_safe(given: Any, expected: Any) -> None:
    value = ranking(Document("a", metadata={"key": given})).to_dict()
    plain = value["documents"][0]["metadata"]["key"]
    assert plain == expected
    assert type(plain) is type(expected)
    assert json.loads(json.dumps(value, allow_nan=False)) == value


def test_the_copy_shares_nothing_with_the_ranking() -> None:
    tags = ["x"]
    value = ranking(Document("a", metadata={"tags": tags}))
    value.to_dict()["documents"][0]["metadata"]["tags"].append("y")
    assert tags == ["x"]
