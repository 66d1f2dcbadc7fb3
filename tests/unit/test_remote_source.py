"""What an adapter takes from a rerank server, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from services import QUERY

from core_rerank.errors import RemoteError
from core_rerank.integrations.source import RemoteSource, Scored


def answering(monkeypatch: pytest.MonkeyPatch, scores: dict[Any, str]) -> RemoteSource:
    """A server whose answer has these scores, written as they are, for whatever is asked."""
    import httpx

    results = ", ".join(f'{{"index": {i}, "relevance_score": {s}}}' for i, s in scores.items())

    def post(self: Any, url: str, json: Any) -> httpx.Response:
        return httpx.Response(200, text=f'{{"results": [{results}]}}')

    async def apost(self: Any, url: str, json: Any) -> httpx.Response:
        return post(self, url, json)

    monkeypatch.setattr(httpx.Client, "post", post)
    monkeypatch.setattr(httpx.AsyncClient, "post", apost)
    return RemoteSource("http://h", None, None, 1.0)


@pytest.mark.parametrize(
    ("scores", "top_n", "told"),
    [
        ({0: "1", 1: "NaN", 2: "0"}, None, "document 1 nan, which is no finite"),
        ({0: "1", 1: "-Infinity", 2: "0"}, None, "document 1 -inf"),
        ({0: "1", 1: "1e999", 2: "0"}, 1, "document 1 inf"),
        ({"1e999": "1"}, None, "no ranking"),
        ({0: "1"}, None, "ranked 1 documents where 3 were asked for, of 3 sent"),
        ({0: "1"}, 2, "ranked 1 documents where 2 were asked for"),
        ({0: "1", 2: "2"}, 9, "ranked 2 documents where 3 were asked for"),
        ({}, 1, "ranked 0 documents"),
    ],
)
def test_a_remote_ranking_is_finite_and_whole(
    scores: dict[Any, str], top_n: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = answering(monkeypatch, scores)
    with pytest.raises(RemoteError, match=told):
        source.rank(QUERY, ["a", "b", "c"], top_n)
    with pytest.raises(RemoteError, match=told):
        asyncio.run(source.arank(QUERY, ["a", "b", "c"], top_n))


def test_a_server_that_ignores_top_n_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    source = answering(monkeypatch, {0: "1", 1: "3", 2: "2"})
    assert source.rank(QUERY, ["a", "b", "c"], 2) == [Scored(1, 3.0), Scored(2, 2.0)]
    assert asyncio.run(source.arank(QUERY, ["a", "b", "c"], 2)) == [Scored(1, 3.0), Scored(2, 2.0)]
    assert len(source.rank(QUERY, ["a", "b", "c"], 9)) == 3
