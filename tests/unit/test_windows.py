"""Windows: contiguous, balanced, complete."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_rerank.settings import check_window
from core_rerank.windows import split_windows


@pytest.mark.parametrize(
    ("count", "window", "sizes"),
    [
        (5, "all", [5]),
        (5, 1, [1, 1, 1, 1, 1]),
        (5, 2, [2, 2, 1]),
        (21, 20, [11, 10]),
        (25, 20, [13, 12]),
        (4, 9, [4]),
        (0, "all", []),
        (0, 3, []),
    ],
)
def test_sizes(count: int, window: object, sizes: list[int]) -> None:
    windows = split_windows(range(count), check_window(window))
    assert [len(chunk) for chunk in windows] == sizes


@given(st.lists(st.integers(), max_size=60), st.integers(1, 70))
def test_windows_hold_everything_once_in_order(places: list[int], window: int) -> None:
    windows = split_windows(places, window)
    assert [place for chunk in windows for place in chunk] == places
    sizes = [len(chunk) for chunk in windows]
    assert max(sizes, default=0) <= window
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


@pytest.mark.parametrize("window", [0, -1, True, 1.0, "every", None])
def test_other_windows_are_refused(window: object) -> None:
    with pytest.raises(ValueError, match="window must be 'all' or a whole number"):
        check_window(window)
