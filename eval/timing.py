"""Time two ways of doing the same work so that drift of the machine falls on both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .significance import BOOTSTRAP_SAMPLES, SEED

Action = Callable[[int], object]
"""One timed run; it is told the number of the repeat, from 0; -1 is the warm-up."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of ``b`` over seconds of ``a``, repeat by repeat.

    Attributes:
        a, b: seconds of each repeat.
        ratio: median of the ratios.
        low, high: 95 % bootstrap interval of that median.
    """

    a: tuple[float, ...]
    b: tuple[float, ...]
    ratio: float
    low: float
    high: float

    def times(self, factor: float) -> Comparison:
        """The same with all ratios multiplied by ``factor``."""
        return Comparison(
            self.a, self.b, self.ratio * factor, self.low * factor, self.high * factor
        )

    def inverse(self) -> Comparison:
        """Seconds of ``a`` over seconds of ``b``."""
        return Comparison(self.b, self.a, 1 / self.ratio, 1 / self.high, 1 / self.low)


def compare(
    a: Action,
    b: Action,
    repeats: int,
    *,
    before: Action = lambda _: None,
    after_each: Callable[[], object] = lambda: None,
    alternate: bool = True,
) -> Comparison:
    """Run ``a`` and ``b`` in turn, after one warm-up of both; see `interleave`."""
    seconds = interleave(
        {"a": a, "b": b},
        repeats,
        before=lambda _, repeat: before(repeat),
        after_each=after_each,
        rotate=alternate,
    )
    return summarise(seconds["a"], seconds["b"])


def interleave(
    actions: Mapping[str, Action],
    repeats: int,
    *,
    before: Callable[[str, int], object] = lambda _name, _repeat: None,
    after_each: Callable[[], object] = lambda: None,
    rotate: bool = True,
) -> dict[str, tuple[float, ...]]:
    """Seconds of every action in each of ``repeats`` rounds, after one warm-up round.

    ``before`` runs untimed before every run and is told whose it is; ``after_each`` after every
    run, for a progress bar. Another action begins each round, unless ``rotate`` is False: then the
    order is always the one given.
    """
    names = list(actions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):
        first = (repeat + 1) % len(names) if rotate else 0
        for name in [*names[first:], *names[:first]]:
            before(name, repeat)
            start = time.perf_counter()
            actions[name](repeat)
            taken = time.perf_counter() - start
            if repeat >= 0:
                seconds[name].append(taken)
            after_each()
    return {name: tuple(values) for name, values in seconds.items()}


def summarise(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Median of the pairwise ratios b/a, and how far the pairs drawn anew move it."""
    import numpy as np

    if len(a) != len(b) or not a:
        raise ValueError(f"pairs of timings are needed, not {len(a)} and {len(b)} of them.")
    ratios = np.asarray(b, dtype=np.float64) / np.asarray(a, dtype=np.float64)
    draws = np.random.default_rng(SEED).integers(0, ratios.size, (BOOTSTRAP_SAMPLES, ratios.size))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return Comparison(tuple(a), tuple(b), float(np.median(ratios)), float(low), float(high))
