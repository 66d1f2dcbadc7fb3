"""A sparse weight for each head, fitted with a listwise loss; no randomness."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_STEPS = 300
_TOLERANCE = 1e-5
_SLACK = 1e-3
_PATH = 30
_PATH_START = 0.99
_PATH_END = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class ListwiseProblem:
    """The mean over queries of a softmax loss, as a function of one weight per head.

    With ``s = features @ w``, a query costs the mean over its positives p of
    ``-log(exp(s_p) / (exp(s_p) + sum_n exp(s_n)))``: the positive's rivals are the negatives n, as
    in CoRe's contrastive score; other positives do not compete.

    Attributes:
        features: float32 [queries, documents, heads], 0 where there is no document.
        positive, negative: bool [queries, documents].
    """

    features: np.ndarray
    positive: np.ndarray
    negative: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, positive: np.ndarray) -> tuple[ListwiseProblem, np.ndarray]:
        """From attention [queries, documents, heads], and the scale [heads] it was divided by.

        A head's scale is its standard deviation within queries, so that one penalty is as hard on
        heads that spread much attention as on those that spread little. A head that does not vary
        has the scale infinity, and so no features.
        """
        import numpy as np

        there = ~np.isnan(values[:, :, 0])
        filled = np.where(there[:, :, None], values, 0.0).astype(np.float64)
        counts = there.sum(axis=1)[:, None, None]
        filled -= filled.sum(axis=1, keepdims=True) / counts
        filled[~there] = 0.0
        scale = np.sqrt((filled**2).sum(axis=1, keepdims=True) / counts).mean(axis=(0, 1))
        scale = np.where(scale > 0, scale, np.inf)
        features = (filled / scale).astype(np.float32)
        return cls(features, positive & there, there & ~positive), scale

    def only(self, heads: np.ndarray) -> ListwiseProblem:
        """The same with some heads; ``heads`` are their numbers."""
        import numpy as np

        features = np.ascontiguousarray(self.features[:, :, heads])
        return ListwiseProblem(features, self.positive, self.negative)

    def gradient(self, weights: np.ndarray) -> np.ndarray:
        """Of the loss by the weights: [heads]."""
        import numpy as np

        scores = (self.features @ weights.astype(np.float32)).astype(np.float64)
        rivals = np.where(self.negative, scores, -np.inf)
        highest = rivals.max(axis=1, keepdims=True)
        shares = np.exp(rivals - highest)
        total = shares.sum(axis=1, keepdims=True)
        margin = np.clip(highest + np.log(total) - scores, -700.0, 700.0)
        missed = np.where(self.positive, 1.0 / (1.0 + np.exp(-margin)), 0.0)
        missed /= self.positive.sum(axis=1, keepdims=True)
        slope = missed.sum(axis=1, keepdims=True) * (shares / total) - missed
        flat = self.features.reshape(slope.size, -1)
        return (slope.ravel().astype(np.float32) @ flat).astype(np.float64) / len(scores)

    def curvature(self) -> float:
        """A bound on the second derivative: a softmax's own is at most 1/2."""
        import numpy as np

        flat = self.features.reshape(-1, self.features.shape[2])
        return (
            0.5
            * float(np.linalg.eigvalsh((flat.T @ flat).astype(np.float64))[-1])
            / len(self.features)
        )


def sparse_path(
    problem: ListwiseProblem, most: int, *, signed: bool = False
) -> Iterator[np.ndarray]:
    """Weights [heads] under an L1 penalty that falls step by step from one that allows none.

    Ends with the first that has more than ``most`` heads. Weights are at least 0 unless ``signed``.
    """
    import numpy as np

    weights = np.zeros(problem.features.shape[2])
    steepest = float(_pull(problem.gradient(weights), signed).max())
    if steepest <= 0:
        return
    for penalty in steepest * np.geomspace(_PATH_START, _PATH_END, _PATH):
        weights = _solve(problem, weights, float(penalty), signed)
        yield weights
        if np.count_nonzero(weights) > most:
            return


def _pull(gradient: np.ndarray, signed: bool) -> np.ndarray:
    """How strongly each head would leave weight 0, in a direction that it may take."""
    return abs(gradient) if signed else -gradient


def _shrunk(weights: np.ndarray, by: float, signed: bool) -> np.ndarray:
    """Weights after the penalty's step: nearer to 0 by ``by``, and not beyond it."""
    import numpy as np

    if signed:
        return np.sign(weights) * np.maximum(abs(weights) - by, 0.0)
    return np.maximum(weights - by, 0.0)


def _solve(problem: ListwiseProblem, start: np.ndarray, penalty: float, signed: bool) -> np.ndarray:
    """Descend over the heads in use; take in those that would lower the loss, until none would.

    Heads only ever enter, so that this ends.
    """
    import numpy as np

    weights, active, solved = start.copy(), np.flatnonzero(start), False
    while True:
        pull = _pull(problem.gradient(weights), signed)
        # A head in use pulls with just the penalty, in whichever direction it has.
        wanted = np.flatnonzero(pull > penalty * (1.0 + _SLACK))
        enlarged = np.union1d(active, wanted)
        if solved and len(enlarged) == len(active):
            return weights
        active, solved = enlarged, True
        weights[active] = _descend(problem.only(active), weights[active], penalty, signed)


def _descend(
    problem: ListwiseProblem, start: np.ndarray, penalty: float, signed: bool
) -> np.ndarray:
    """Proximal gradient steps with Nesterov's momentum, restarted when they overshoot."""
    import numpy as np

    curvature = problem.curvature()
    weights, ahead, momentum = start, start, 1.0
    for _ in range(_STEPS):
        stepped = _shrunk(ahead - problem.gradient(ahead) / curvature, penalty / curvature, signed)
        moved = stepped - weights
        if float(((ahead - stepped) * moved).sum()) > 0:
            momentum = 1.0
        following = (1.0 + (1.0 + 4.0 * momentum**2) ** 0.5) / 2.0
        ahead = stepped + (momentum - 1.0) / following * moved
        weights, momentum = stepped, following
        if np.abs(moved).max() <= _TOLERANCE * max(1.0, float(np.abs(weights).max())):
            break
    return weights
