"""The memory of null passes: bounded by floats, least recently used out first, exact keys."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from core_rerank.calibration import NullPassMemory, pass_key
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head


def test_the_least_recently_used_goes_first() -> None:
    memory = NullPassMemory(max_floats=10)
    memory.put("a", np.ones(4))
    memory.put("b", np.ones(4))
    assert memory.get("a") is not None
    memory.put("c", np.ones(4))
    assert memory.get("b") is None
    assert memory.get("a") is not None
    assert memory.get("c") is not None
    assert (len(memory), memory.floats) == (2, 8)


def test_replacing_an_entry_counts_once() -> None:
    memory = NullPassMemory(max_floats=10)
    for size in (6, 3, 9):
        memory.put("a", np.ones(size))
    assert (len(memory), memory.floats) == (1, 9)


def test_what_is_too_large_is_not_kept_and_evicts_nothing() -> None:
    memory = NullPassMemory(max_floats=10)
    memory.put("a", np.ones(4))
    memory.put("b", np.ones(11))
    assert memory.get("b") is None
    assert memory.get("a") is not None


def test_entries_are_copies_that_cannot_be_changed() -> None:
    memory = NullPassMemory()
    values = np.array([1.0, 2.0])
    memory.put("a", values)
    values[0] = 9
    kept = memory.get("a")
    assert kept is not None
    assert kept.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 9


def test_clear_and_a_bound_of_zero() -> None:
    memory = NullPassMemory()
    memory.put("a", np.ones(3))
    memory.clear()
    assert (len(memory), memory.floats) == (0, 0)
    none = NullPassMemory(max_floats=0)
    none.put("a", np.ones(1))
    assert len(none) == 0


@pytest.mark.parametrize("bound", [-1, True, 1.5, "many"])
def test_a_bound_that_is_no_count_is_refused(bound: object) -> None:
    with pytest.raises(ValueError, match="max_floats"):
        NullPassMemory(max_floats=bound)  # pyright: ignore[reportArgumentType]


def test_threads_leave_the_count_right() -> None:
    memory = NullPassMemory(max_floats=500)

    def work(seed: int) -> None:
        for i in range(300):
            memory.put((seed + i) % 90, np.ones(1 + i % 20))
            memory.get(i % 90)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [memory.get(key) for key in range(90)]
    assert memory.floats == sum(values.size for values in held if values is not None) <= 500


def test_keys_tell_apart_what_gives_other_numbers() -> None:
    def key(tokens=(1, 2, 3, 4), heads=(Head(0, 1),), rows=(3, 4), spans=((0, 2),), model="m"):
        return pass_key(CaptureRequest(tokens, AttentionProbe(heads, rows, spans)), model)

    others = [
        key(tokens=(1, 2, 3, 5)),
        key(heads=(Head(1, 1),)),
        key(heads="all"),
        key(rows=(2, 4)),
        key(spans=((0, 1), (1, 2))),
        key(model="n"),
    ]
    assert key() == key()
    assert len({key(), *others}) == len(others) + 1
