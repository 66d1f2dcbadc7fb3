"""What may be said about a mean over queries, about a difference of means, and about length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

SEED = 20240607
CONFIDENCE = 0.95
BOOTSTRAP_SAMPLES = 10_000
PERMUTATIONS = 10_000
_CHUNK = 500  # bootstrap samples drawn at once: 60 MB for 7,405 queries


def paired_bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of per-query values or differences.

    Queries are drawn with replacement, the same ones for every system (the seed is fixed), which
    is what makes the intervals paired.
    """
    import numpy as np

    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("a bootstrap needs the difference of at least one query.")
    generator = np.random.default_rng(SEED)
    means = np.empty(BOOTSTRAP_SAMPLES)
    for start in range(0, BOOTSTRAP_SAMPLES, _CHUNK):
        part = means[start : start + _CHUNK]
        draws = generator.integers(0, array.size, (len(part), array.size))
        part[:] = array[draws].mean(axis=1)
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)


def paired_randomisation(differences: Sequence[float]) -> float:
    """Two-sided p of the paired randomisation test that the mean difference is 0; fixed seed.

    Each query's difference is as likely with the other sign if the systems are equally good. All
    sign patterns are tried where there are no more than `PERMUTATIONS`, else so many at random.
    """
    import numpy as np
    from scipy.stats import permutation_test

    array = np.asarray(differences, dtype=np.float64)
    if array.size == 0:
        raise ValueError("a randomisation test needs the difference of at least one query.")
    if not array.any():
        return 1.0
    if array.size == 1:
        return 1.0  # both sign patterns are as extreme; scipy wants two differences
    found = permutation_test(
        (array,),
        lambda signed, axis: np.mean(signed, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=PERMUTATIONS,
        batch=1000,
        rng=np.random.default_rng(SEED),
    )
    return float(found.pvalue)


def length_correlation(queries: Sequence[tuple[Sequence[float], Sequence[int]]]) -> float | None:
    """Spearman's rank correlation of scores with lengths within a query, averaged over queries.

    Args:
        queries: per query the documents' scores and their lengths.

    Returns:
        -1 to 1, or None where no query has two different scores and two different lengths.
    """
    from scipy.stats import spearmanr

    found = [
        float(cast("Any", spearmanr(scores, lengths)).statistic)
        for scores, lengths in queries
        if len(set(scores)) > 1 and len(set(lengths)) > 1
    ]
    return sum(found) / len(found) if found else None
