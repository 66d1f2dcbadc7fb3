"""rerank(): engines and rerankers made once, shared, dropped when they fail, closed at exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_backend import FakeBackend
from tokenizer_families import FAMILIES

import core_rerank
from core_rerank import HeadSet, InjectionHeads, backends, shared
from core_rerank.pool import BackendPool, setting_key
from hook_runtime.errors import ClosedError, IncompleteCaptureError, ProbeError

HEADS = ["1-2", "0-1"]
MODEL = "test/fake"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_slots", {})
    monkeypatch.setattr(shared, "_pool", BackendPool())


@pytest.fixture(scope="module")
def backend() -> FakeBackend:
    return FakeBackend(FAMILIES["byte-level"]())


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeBackend]:
    """The engines that were started, in order; each has 4 layers, or those that were asked for."""
    started: list[FakeBackend] = []

    def load(path_or_id: str, options: Mapping[str, Any]) -> FakeBackend:
        time.sleep(options.get("start_seconds", 0))
        layers = options["layers"]
        if layers == "auto":
            layers = min(4, 1 + max(head.layer for head in options["heads"]))
        tokenizer = FAMILIES["byte-level"]()
        started.append(FakeBackend(tokenizer, name=options["name"], layers_kept=layers))
        return started[-1]

    monkeypatch.setattr(backends, "_load_vllm", load)
    monkeypatch.setattr(backends, "_load_transformers", load)
    return started


def held() -> list[Any]:
    return [slot.reranker for slot in shared._slots.values()]


def rank(**settings: Any) -> core_rerank.Ranking:
    settings = {"heads": HEADS} | settings
    return core_rerank.rerank("cat", ["a cat", "a dog"], MODEL, **settings)


def in_threads(work: Callable[[int], object], count: int) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_it_ranks(backend: FakeBackend) -> None:
    ranking = core_rerank.rerank(
        "cat", ["dog", "cat"], doc_ids=[5, 6], top_n=1, explain=True, heads=HEADS, backend=backend
    )
    assert [item.doc_id for item in ranking] == [6]
    assert ranking[0].token_scores


def test_arguments_are_checked_before_anything_is_loaded() -> None:
    for query, documents, top_n in (("", ["a"], None), ("q", ["a", 3], None), ("q", ["a"], 0)):
        with pytest.raises((TypeError, ValueError)):
            core_rerank.rerank(query, documents, top_n=top_n)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="explain must be"):
        core_rerank.rerank("q", ["a"], explain="head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="explain must be"):
        asyncio.run(shared.arerank("q", ["a"], explain=1))  # type: ignore[arg-type]
    assert not held()


def test_iterators_are_read_once(backend: FakeBackend) -> None:
    ranking = core_rerank.rerank(
        "cat", iter(["dog", "cat"]), doc_ids=iter("ab"), heads=HEADS, backend=backend
    )
    assert [item.doc_id for item in ranking] == ["b", "a"]


# ------------------------------------------------------------------ rerankers


def test_equal_settings_share_a_reranker(backend: FakeBackend) -> None:
    for heads in (HEADS, list(HEADS), tuple(HEADS), iter(HEADS)):
        core_rerank.rerank("cat", ["a"], heads=heads, backend=backend, window=1)
    assert len(held()) == 1
    core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, window=2)
    core_rerank.rerank("cat", ["a"], heads=HEADS[::-1], backend=backend, window=1)
    core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, window=1, calibrate=False)
    assert len(held()) == 4


def test_a_default_spelled_out_shares_the_reranker(backend: FakeBackend) -> None:
    for settings in ({}, {"window": None}, {"strategy": "core", "calibrate": None}):
        core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend, **settings)
    assert len(held()) == 1


def test_null_passes_are_remembered_between_calls(engines: list[FakeBackend]) -> None:
    rank()
    rank()
    rank(strategy="qr")
    assert [len(batch) for batch in engines[0].batches] == [2, 1, 2]


def test_a_rewritten_head_set_file_is_read_again(
    engines: list[FakeBackend], tmp_path: Path
) -> None:
    path = tmp_path / "heads.yaml"
    for head in ("1-2", "0-1", "1-2"):
        HeadSet(MODEL, 4, 3, (head,), "core").to_yaml(path)  # type: ignore[arg-type]
        rank(heads=None, config=path)
    (engine,) = engines
    assert [batch[0].probe.heads[0] for batch in engine.batches] == [(1, 2), (0, 1), (1, 2)]
    assert len(held()) == 2


def screen_heads(threshold: float) -> InjectionHeads:
    return InjectionHeads.model_validate(
        {
            "model": MODEL,
            "num_layers": 4,
            "num_heads": 3,
            "heads": ["1-1"],
            "threshold": threshold,
            "method": "k-sigma",
            "task": "document",
        }
    )


def screened(heads: object) -> bool:
    return rank(window=1, screen=True, screen_heads=heads)[0].flagged


def test_equal_screen_heads_share_a_reranker_and_a_rewritten_file_is_read_again(
    engines: list[FakeBackend], tmp_path: Path
) -> None:
    path = tmp_path / "screen.yaml"
    for threshold, flagged in ((0.0, True), (1.0, False)):
        screen_heads(threshold).to_yaml(path)
        assert screened(path) == screened(str(path)) == flagged
        assert screened(screen_heads(threshold)) == screened(screen_heads(threshold)) == flagged
    assert len(held()) == 2
    assert len(engines) == 1


# ------------------------------------------------------------------ engines


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "qr"},
        {"window": 1},
        {"calibrate": False},
        {"max_tokens_per_doc": 9},
        {"heads": ["1-0"]},
        {"heads": ["0-0"], "strategy": "qr", "window": 2},
    ],
)
def test_one_engine_serves_other_settings(
    engines: list[FakeBackend], settings: dict[str, Any]
) -> None:
    rank(max_model_len=512)
    ranking = rank(max_model_len=512, **settings)
    assert len(engines) == 1
    assert len(held()) == 2
    assert ranking.strategy == settings.get("strategy", "core")
    assert ranking.model == MODEL


def test_other_engine_settings_models_and_backends_have_their_own(
    engines: list[FakeBackend],
) -> None:
    rank()
    rank(max_model_len=512)
    rank(backend="transformers")
    core_rerank.rerank("cat", ["a"], "test/other", heads=HEADS)
    assert [engine.model.name for engine in engines] == [MODEL, MODEL, MODEL, "test/other"]


def test_layers_that_were_not_loaded_need_an_engine_of_their_own(
    engines: list[FakeBackend],
) -> None:
    every = {"strategy": "icr", "heads": None}
    rank()
    rank(**every)
    assert [engine.model.layers_kept for engine in engines] == [2, 4]
    for settings in ({"heads": ["3-0"]}, {"layers": None}, {"layers": 2}, {"window": 1}):
        rank(**settings)
        rank(**every, window=1)
    assert len(engines) == 2
    rank(heads=["0-0"], layers=1)
    assert engines[2].model.layers_kept == 1


def test_a_whole_engine_serves_every_strategy(engines: list[FakeBackend]) -> None:
    rank(strategy="icr", heads=None)
    rank()
    rank(strategy="qr", heads=["2-1"])
    assert len(engines) == 1


def test_a_head_that_does_not_exist_starts_no_second_engine(engines: list[FakeBackend]) -> None:
    rank()
    with pytest.raises(ProbeError, match="head 9-0 does not exist"):
        rank(heads=["9-0"])
    assert len(engines) == 1
    assert not engines[0].closed


def test_threads_start_one_engine_a_model(engines: list[FakeBackend]) -> None:
    windows = [1, 2, "all", 1]
    in_threads(lambda i: rank(window=windows[i], start_seconds=0.05), len(windows))
    assert len(engines) == 1
    assert len(held()) == 3


def test_a_start_that_fails_is_tried_again_and_leaves_no_engine(
    engines: list[FakeBackend],
) -> None:
    wrong = HeadSet(MODEL, 5, 3, ("0-1",), "core")  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(core_rerank.HeadSetError, match="5 layers of 3 heads"):
            rank(heads=wrong)
    assert [engine.closed for engine in engines] == [True, True]
    rank()
    with pytest.raises(core_rerank.HeadSetError):
        rank(heads=wrong)
    assert [engine.closed for engine in engines] == [True, True, False]
    rank(window=1)
    assert len(engines) == 3


def test_settings_without_a_hash_are_told_apart_by_identity() -> None:
    class Config:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    one, two = Config(), Config()
    assert setting_key({"a": one}) == setting_key({"a": one})
    assert setting_key({"a": one}) != setting_key({"a": two})
    assert hash(setting_key([one])) == hash(setting_key((one,)))


# ------------------------------------------------------------------ failures


class EngineDeadError(Exception):
    """As vLLM raises: neither one of ours nor an error of arguments."""


def fail(engine: FakeBackend, error: Exception) -> None:
    def capture(*_: Any, **__: Any) -> Any:
        raise error

    engine.capture = capture  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [EngineDeadError("dead"), IncompleteCaptureError("rows")])
def test_after_a_failure_the_next_call_starts_afresh(
    engines: list[FakeBackend], error: Exception
) -> None:
    rank()
    rank(window=1)
    fail(engines[0], error)
    with pytest.raises(type(error)) as caught:
        rank()
    assert caught.value is error
    assert engines[0].closed
    assert held() == [None, None]
    for window in (None, 1):
        assert len(rank(window=window)) == 2
    assert len(engines) == 2


def test_an_engine_that_was_closed_is_replaced(engines: list[FakeBackend]) -> None:
    rank()
    engines[0].close()
    with pytest.raises(ClosedError, match="closed"):
        rank()
    assert len(rank()) == 2
    assert len(engines) == 2


@pytest.mark.parametrize(
    "error", [ProbeError("x"), ValueError("x"), TypeError("x"), core_rerank.NotFiniteError("x")]
)
def test_bad_input_keeps_the_engine(engines: list[FakeBackend], error: Exception) -> None:
    rank()
    capture = engines[0].capture
    fail(engines[0], error)
    with pytest.raises(type(error)):
        rank()
    engines[0].capture = capture  # type: ignore[method-assign]
    rank()
    assert len(engines) == 1


def test_a_backend_of_the_users_is_dropped_but_not_closed(backend: FakeBackend) -> None:
    capture = backend.capture
    core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend)
    fail(backend, EngineDeadError("dead"))
    try:
        with pytest.raises(EngineDeadError):
            core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend)
    finally:
        backend.capture = capture  # type: ignore[method-assign]
    assert held() == [None]
    assert not backend.closed
    assert len(core_rerank.rerank("cat", ["a"], heads=HEADS, backend=backend)) == 1


def test_a_failure_to_close_is_noted_on_the_error(
    engines: list[FakeBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(_: FakeBackend) -> None:
        raise OSError("no such process")

    with monkeypatch.context() as patch:
        patch.setattr(FakeBackend, "close", close)
        rank()
        fail(engines[0], EngineDeadError("dead"))
        with pytest.raises(EngineDeadError) as caught:
            rank()
    (note,) = caught.value.__notes__
    assert "no such process" in note
    assert len(rank()) == 2


def test_threads_that_fail_together_start_one_new_engine(engines: list[FakeBackend]) -> None:
    rank()
    fail(engines[0], EngineDeadError("dead"))
    failures = []

    def work(_: int) -> None:
        try:
            rank()
        except EngineDeadError as error:
            failures.append(error)

    in_threads(work, 4)
    assert failures
    rank()
    assert [engine.closed for engine in engines] == [True, False]


# ------------------------------------------------------------------ the end


def test_engines_are_closed_at_exit() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from fake_backend import FakeBackend
from tokenizer_families import FAMILIES
import core_rerank
from core_rerank import backends

class Engine(FakeBackend):
    def close(self):
        print("closed")

backends._load_vllm = lambda *_: Engine(FAMILIES["byte-level"]())
for window in (1, 2):
    print(len(core_rerank.rerank("q", ["a"], "test/fake", heads=["0-0"], window=window)))
"""
    tests = Path(__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code, str(tests)], capture_output=True, text=True
    )
    assert result.stdout.split() == ["1", "1", "closed"], result.stderr
