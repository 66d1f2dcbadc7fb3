"""Scoring against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from core_rerank.scoring import (
    STRATEGIES,
    aggregate_heads,
    calibrate,
    filter_tokens,
    score_document,
)


def test_heads_are_summed() -> None:
    values = np.array([[1, 2, 3], [10, 20, 30]], dtype=np.float32)
    assert aggregate_heads(values).tolist() == [11, 22, 33]
    assert aggregate_heads(values).dtype == np.float64


def test_heads_can_be_weighted() -> None:
    values = np.array([[1, 2], [10, 20]])
    assert aggregate_heads(values, [1, 0.5]).tolist() == [6, 12]
    with pytest.raises(ValueError, match="3 weights were given for 2 heads"):
        aggregate_heads(values, [1, 1, 1])


def test_sums_are_kept_in_float64() -> None:
    values = np.array([[1e8], [1.0], [-1e8]], dtype=np.float32)
    assert aggregate_heads(values).tolist() == [1.0]


def test_calibration_subtracts_the_null_query() -> None:
    assert calibrate(np.array([3.0, 1.0]), np.array([1.0, 2.0])).tolist() == [2, -1]


def test_a_token_two_sample_deviations_below_the_mean_is_left_out() -> None:
    # Nine ones and a -9: mean 0, sample variance 90 / 9 = 10, threshold -2 * sqrt(10) = -6.32.
    tokens = np.array([1.0] * 9 + [-9.0])
    assert filter_tokens(tokens).tolist() == [True] * 9 + [False]
    assert score_document(tokens, token_filter=True).score == 9
    assert score_document(tokens, token_filter=False).score == 0


def test_the_deviation_is_the_samples_not_the_populations() -> None:
    # Mean -1/3, squares 28/3: the sample's threshold is -1/3 - 2 * sqrt(28/15) = -3.066, which
    # keeps the -3; the population's would be -1/3 - 2 * sqrt(28/18) = -2.828.
    assert filter_tokens(np.array([0.0, 0.0, 0.0, 0.0, 1.0, -3.0])).all()


@pytest.mark.parametrize("value", [0.5, -0.5, 0.0])
def test_one_token_is_its_own_score(value: float) -> None:
    scored = score_document(np.array([value]), token_filter=True)
    assert scored.score == value
    assert scored.kept.tolist() == [True]


@pytest.mark.parametrize("count", [2, 3, 7, 10])
def test_equal_tokens_are_all_kept(count: int) -> None:
    scored = score_document(np.full(count, 0.1), token_filter=True)
    assert scored.kept.all()
    assert scored.score == pytest.approx(0.1 * count)


def test_an_empty_document_scores_zero() -> None:
    assert score_document(np.array([]), token_filter=True).score == 0.0


def test_the_three_strategies() -> None:
    described = {s.name: (s.heads, s.rows, s.token_filter) for s in STRATEGIES.values()}
    assert described == {
        "core": ("selected", "query", True),
        "icr": ("all", "query", True),
        "qr": ("selected", "instruction", False),
    }
