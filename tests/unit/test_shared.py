"""rerank(): one reranker per model and settings, made once, closed at exit."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from tokenizer_families import FAMILIES

import core_rerank
from core_rerank import shared

HEADS = ["1-2", "0-1"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_slots", {})


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(FAMILIES["byte-level"]())


def held() -> list[Any]:
    return [slot.reranker for slot in shared._slots.values()]


def test_it_ranks(backend: FakeBackend) -> None:
    ranking = core_rerank.rerank(
        "cat", ["dog", "cat"], doc_ids=[5, 6], top_n=1, explain=True, heads=HEADS, backend=backend
    )
    assert [item.doc_id for item in ranking] == [6]
    assert ranking[0].token_scores


def test_equal_settings_share_a_reranker(backend: FakeBackend) -> None:
    for heads in (HEADS, list(HEADS), tuple(HEADS)):
        core_rerank.rerank("cat", ["a"], heads=heads, backend=backend, window=1)
    assert len(held()) == 1
    core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, window=2)
    core_rerank.rerank("cat", ["a"], heads=HEADS[::-1], backend=backend, window=1)
    core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, window=1, calibrate=False)
    assert len(held()) == 4


def test_a_default_spelled_out_shares_the_reranker(backend: FakeBackend) -> None:
    for settings in ({}, {"window": None}, {"strategy": "core", "calibrate": True}):
        core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, **settings)
    assert len(held()) == 1


def test_arguments_are_checked_before_anything_is_loaded() -> None:
    for query, documents, top_n in (("", ["a"], None), ("q", ["a", 3], None), ("q", ["a"], 0)):
        with pytest.raises((TypeError, ValueError)):
            core_rerank.rerank(query, documents, top_n=top_n)  # type: ignore[list-item]
    assert not held()


def test_iterators_are_read_once(backend: FakeBackend) -> None:
    ranking = core_rerank.rerank(
        "cat", iter(["dog", "cat"]), doc_ids=iter("ab"), heads=HEADS, backend=backend
    )
    assert [item.doc_id for item in ranking] == ["b", "a"]


def test_a_failed_start_is_tried_again(backend: FakeBackend) -> None:
    for _ in range(2):
        with pytest.raises(core_rerank.HeadSetError):
            core_rerank.rerank("cat", ["a"], backend=backend)
    assert held() == [None]


def test_threads_start_one_reranker(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Slow(core_rerank.Reranker):
        def __init__(self, *args: Any, **settings: Any) -> None:
            time.sleep(0.05)
            super().__init__(*args, **settings)
            made.append(self)

    monkeypatch.setattr(shared, "Reranker", Slow)
    threads = [
        threading.Thread(
            target=core_rerank.rerank,
            args=("cat", ["a"]),
            kwargs={"heads": HEADS, "backend": backend},
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_it_is_closed_at_exit() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_backend import FakeBackend
from tokenizer_families import FAMILIES
import core_rerank
core_rerank.Reranker.close = lambda self: print("closed")
backend = FakeBackend(FAMILIES["byte-level"]())
print(len(core_rerank.rerank("q", ["a"], heads=["0-0"], backend=backend)))
"""
    tests = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code, str(tests)], capture_output=True, text=True
    )
    assert result.stdout.split() == ["1", "closed"], result.stderr
