"""Intervals, p values and length bias."""

from __future__ import annotations

import itertools
import random

import pytest

from core_rerank.eval.significance import (
    length_correlation,
    paired_bootstrap,
    paired_randomisation,
)


def test_bootstrap_covers_the_mean_and_is_deterministic() -> None:
    differences = [0.1] * 30 + [-0.05] * 10
    low, high = paired_bootstrap(differences)
    assert low < sum(differences) / 40 < high
    assert (low, high) == paired_bootstrap(differences)
    assert paired_bootstrap([0.25, 0.25]) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one query"):
        paired_bootstrap([])


def test_randomisation_tries_every_sign_where_that_is_possible() -> None:
    differences = [0.3, 0.2, -0.1, 0.05, 0.4]
    observed = abs(sum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    extreme = sum(
        abs(sum(s * d for s, d in zip(pattern, differences, strict=True))) >= observed - 1e-12
        for pattern in signs
    )
    assert paired_randomisation(differences) == pytest.approx(extreme / len(signs))


def test_randomisation_tells_an_effect_from_noise_and_is_deterministic() -> None:
    draw = random.Random(0)
    noise = [draw.gauss(0, 0.1) for _ in range(60)]
    centred = [value - sum(noise) / 60 for value in noise]
    assert paired_randomisation(centred) > 0.9
    assert paired_randomisation([value + 0.1 for value in centred]) < 0.001
    assert paired_randomisation(noise) == paired_randomisation(noise)
    assert paired_randomisation([0.0, 0.0]) == paired_randomisation([0.4]) == 1.0
    with pytest.raises(ValueError, match="at least one query"):
        paired_randomisation([])


def test_length_correlation_is_a_mean_over_queries_that_have_one() -> None:
    rising, falling = ([1.0, 2.0, 3.0], [10, 20, 30]), ([3.0, 2.0, 1.0], [1, 5, 9])
    assert length_correlation([rising]) == pytest.approx(1.0)
    assert length_correlation([rising, falling]) == pytest.approx(0.0)
    assert length_correlation([falling, ([1.0, 1.0], [1, 2]), ([1.0, 2.0], [7, 7])]) == (
        pytest.approx(-1.0)
    )
    assert length_correlation([([1.0], [3])]) is None
