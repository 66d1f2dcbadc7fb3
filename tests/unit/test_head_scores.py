"""Scores of heads and qualities of rankings, computed by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from core_rerank.head_scores import (
    best_heads,
    contrastive_by_query,
    random_quality,
    ranking_quality,
)
from hook_runtime.specs import Head

LAYERS, HEADS = 3, 2
PLANTED = Head(1, 1)


def stack(*documents: Sequence[Sequence[float]]) -> np.ndarray:
    """[documents, layers, heads] as one query's values."""
    return np.array([documents], dtype=float)


def test_contrastive_score_of_one_query_by_hand() -> None:
    values = stack([[0.3]], [[0.1]], [[0.2]])
    positive = np.array([[True, False, False]])
    expected = math.exp(3) / (math.exp(3) + math.exp(1) + math.exp(2))
    assert contrastive_by_query(values, positive, 0.1)[0, 0, 0] == pytest.approx(expected)


def test_positives_do_not_compete_and_are_averaged() -> None:
    values = stack([[1.0]], [[3.0]], [[2.0]])
    positive = np.array([[True, True, False]])
    one = math.exp(1) / (math.exp(1) + math.exp(2))
    two = math.exp(3) / (math.exp(3) + math.exp(2))
    assert contrastive_by_query(values, positive, 1.0)[0, 0, 0] == pytest.approx((one + two) / 2)


def test_each_query_has_its_score_and_padding_does_not_count() -> None:
    nan = math.nan
    values = np.array([[[[1.0]], [[0.0]], [[nan]]], [[[0.0]], [[0.0]], [[0.0]]]])
    positive = np.array([[True, False, False], [True, False, False]])
    first = math.exp(1) / (math.exp(1) + 1)
    assert contrastive_by_query(values, positive, 1.0)[:, 0, 0] == pytest.approx([first, 1 / 3])


@pytest.mark.parametrize("temperature", [1e-12, 1e12])
def test_no_temperature_overflows(temperature: float) -> None:
    values = stack([[0.9, -0.9]], [[0.1, 0.1]])
    scores = contrastive_by_query(values, np.array([[True, False]]), temperature)
    assert np.isfinite(scores).all()
    expected = [1.0, 0.0] if temperature < 1 else [0.5, 0.5]
    assert scores[0, 0] == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        contrastive_by_query(stack([[1.0]], [[0.0]]), np.array([[True, False]]), temperature)


def test_best_heads_break_ties_by_layer_and_head() -> None:
    scores = np.array([[0.1, 0.5], [0.5, 0.9], [0.9, 0.5]])
    assert best_heads(scores, 4) == [Head(1, 1), Head(2, 0), Head(0, 1), Head(1, 0)]
    for count in (0, 7):
        with pytest.raises(ValueError, match=f"cannot choose {count} heads of 6"):
            best_heads(scores, count)


def test_ranking_quality_by_hand() -> None:
    values = stack([[0.5, 0.0]], [[0.7, 0.0]], [[0.1, 0.9]])
    positive = np.array([[True, False, False]])
    one = ranking_quality(values, positive, [Head(0, 0)])
    assert (one.ndcg_at_10, one.mrr) == (pytest.approx(1 / math.log2(3)), 0.5)
    both = ranking_quality(values, positive)
    assert (both.ndcg_at_10, both.mrr) == (pytest.approx(0.5), pytest.approx(1 / 3))


def test_ties_count_against_the_positive() -> None:
    values = stack([[1.0]], [[1.0]])
    assert ranking_quality(values, np.array([[True, False]])).mrr == 0.5


def test_random_heads_are_the_same_for_the_same_seed() -> None:
    values = np.random.default_rng(0).normal(size=(5, 4, LAYERS, HEADS))
    positive = np.zeros((5, 4), bool)
    positive[:, 0] = True
    first = random_quality(values, positive, 2, seed=1)
    assert first == random_quality(values, positive, 2, seed=1)
    assert first != random_quality(values, positive, 2, seed=2)
