"""Which heads tell attacks from benign data, by two methods, and where to put the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from hook_runtime.specs import Head

from .errors import DataError, MissingDependencyError
from .injection_scoring import suspicion

if TYPE_CHECKING:
    import numpy as np

Method = Literal["k-sigma", "signed"]
METHODS: tuple[Method, ...] = get_args(Method)
DEFAULT_K = 4.0
DEFAULT_HEADS = 16
FOLDS = 5
# Inverse strengths of the L1 penalty, from one that leaves no head to one that leaves most.
_PATH = (-4.0, 1.0, 41)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What heads did on labelled texts of one or several data sets, one row a text.

    Attributes:
        drawn: float64 [texts, heads]: the share of attention drawn from the instruction.
        attack: bool [texts].
        sets: int [texts]: the data set a text is from.
        groups: one a text; those of one group stay together when texts are dealt out.
        num_heads: heads a layer, which makes a column a `Head`.
    """

    drawn: np.ndarray
    attack: np.ndarray
    sets: np.ndarray
    groups: tuple[str, ...]
    num_heads: int

    @classmethod
    def of(
        cls,
        parts: Sequence[tuple[np.ndarray, np.ndarray, Sequence[str]]],
        num_heads: int,
    ) -> Evidence:
        """From (drawn, attack, groups) of each data set."""
        import numpy as np

        return cls(
            drawn=np.concatenate([drawn for drawn, _, _ in parts]),
            attack=np.concatenate([attack for _, attack, _ in parts]),
            sets=np.concatenate([np.full(len(a), i) for i, (_, a, _) in enumerate(parts)]),
            groups=tuple(f"{i} {g}" for i, (_, _, groups) in enumerate(parts) for g in groups),
            num_heads=num_heads,
        )

    def only(self, rows: np.ndarray) -> Evidence:
        """Some of the texts."""
        groups = tuple(self.groups[row] for row in rows)
        return Evidence(
            self.drawn[rows], self.attack[rows], self.sets[rows], groups, self.num_heads
        )

    def cell_weights(self) -> np.ndarray:
        """float64 [texts]: benign and attacking texts of every data set count the same in all."""
        import numpy as np

        cells = 2 * self.sets + self.attack
        counts = np.bincount(cells)
        weights = 1.0 / counts[cells]
        return weights / weights.mean()

    def separation(self) -> np.ndarray:
        """float64 [heads]: how far benign and attacking texts lie apart, in standard deviations.

        ``(mean of attacks - mean of benign) / (their two deviations added)``, averaged over the
        data sets that have both. That it exceeds k is Attention Tracker's rule for an important
        head (arXiv 2411.00348), ``mean_N - k sd_N > mean_A + k sd_A`` of the focus, solved for k.

        Raises:
            DataError: no data set has both.
        """
        import numpy as np

        apart = []
        for number in np.unique(self.sets):
            rows = self.sets == number
            benign = self.drawn[rows & ~self.attack]
            attack = self.drawn[rows & self.attack]
            if not len(benign) or not len(attack):
                continue
            spread = benign.std(axis=0) + attack.std(axis=0)
            gap = attack.mean(axis=0) - benign.mean(axis=0)
            apart.append(np.divide(gap, spread, out=np.zeros_like(gap), where=spread > 0))
        if not apart:
            raise DataError(
                "no data set has both benign texts and attacks, so that what differs could be the "
                "data set: give one file with both."
            )
        return np.mean(apart, axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class FoundHeads:
    """Heads, best first, and how their ``drawn`` shares make a score (see `injection_scoring`).

    Attributes:
        weights: one a head, or None for a plain mean.
        k: the separation that every head exceeds; None for "signed".
        by_rule: the k asked for was reached; otherwise the best heads stand in.
    """

    heads: tuple[Head, ...]
    method: Method
    weights: tuple[float, ...] | None = None
    intercept: float = 0.0
    k: float | None = None
    by_rule: bool = True

    def scores(self, drawn: np.ndarray, num_heads: int) -> np.ndarray:
        """float64 [texts] from ``drawn`` [texts, heads of all layers]."""
        columns = [head.layer * num_heads + head.head for head in self.heads]
        return suspicion(1.0 - drawn[:, columns], self.weights, self.intercept)


def find_heads(
    evidence: Evidence, method: Method, *, count: int = DEFAULT_HEADS, k: float = DEFAULT_K
) -> FoundHeads:
    """The heads that ``method`` takes.

    - k-sigma: every head whose separation exceeds ``k`` (the paper's rule, k = 4); where none does,
      the ``count`` best, with the k that they reach. Their plain mean is the score.
    - signed: at most ``count`` heads that a logistic regression with an L1 penalty keeps, with
      weights of either sign refitted under a weak L2 penalty.

    Raises:
        ValueError: an unknown method, a count below 1, or texts of one kind only.
        MissingDependencyError: "signed" without scikit-learn.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}.")
    if count < 1:
        raise ValueError(f"the number of heads must be at least 1, not {count}.")
    if evidence.attack.all() or not evidence.attack.any():
        raise ValueError("heads are found by comparing: give both benign and attacking texts.")
    if method == "signed":
        return _signed(evidence, count)
    return _k_sigma(evidence, count, k)


def _k_sigma(evidence: Evidence, count: int, k: float) -> FoundHeads:
    import numpy as np

    apart = evidence.separation()
    order = np.argsort(-apart, kind="stable")
    passing = [int(i) for i in order if apart[i] > k]
    chosen = passing or [int(i) for i in order[:count]]
    heads = tuple(_head(i, evidence.num_heads) for i in chosen)
    reached = k if passing else float(apart[chosen[-1]])
    return FoundHeads(heads, "k-sigma", k=reached, by_rule=bool(passing))


def _signed(evidence: Evidence, count: int) -> FoundHeads:
    import numpy as np

    linear: Any = _scikit("linear_model")
    counts = evidence.cell_weights()
    scale = evidence.drawn.std(axis=0)
    usable = np.flatnonzero(scale > 0)
    features = evidence.drawn[:, usable] / scale[usable]
    centre = np.average(features, axis=0, weights=counts)
    kept = np.array([], dtype=int)
    for strength in np.logspace(*_PATH):
        model = linear.LogisticRegression(
            l1_ratio=1.0, solver="liblinear", C=strength, random_state=0, max_iter=1000
        )
        model.fit(features - centre, evidence.attack, sample_weight=counts)
        used = np.flatnonzero(model.coef_[0])
        if len(used) > count:
            break
        kept = used
    if not len(kept):
        return _k_sigma(evidence, count, DEFAULT_K)
    refitted = linear.LogisticRegression(C=1.0, max_iter=5000)
    refitted.fit(features[:, kept] - centre[kept], evidence.attack, sample_weight=counts)
    size = refitted.coef_[0]
    order = np.argsort(-abs(size), kind="stable")
    plain = size / scale[usable[kept]]
    weights = tuple(float(f"{plain[i]:.5g}") for i in order)
    intercept = float(refitted.intercept_[0] - (size * centre[kept]).sum())
    heads = tuple(_head(int(usable[kept[i]]), evidence.num_heads) for i in order)
    return FoundHeads(heads, "signed", weights, float(f"{intercept:.5g}"))


def held_out_scores(
    evidence: Evidence, method: Method, *, count: int = DEFAULT_HEADS, k: float = DEFAULT_K
) -> np.ndarray:
    """float64 [texts]: each text scored by heads found without its fold (five, by group).

    Raises:
        DataError: the texts cannot be dealt out so that both kinds are left every time.
    """
    import numpy as np

    _check_groups(evidence)
    selection: Any = _scikit("model_selection")
    folds = selection.StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0)
    scores = np.empty(len(evidence.attack))
    cells = 2 * evidence.sets + evidence.attack
    for rest, fold in folds.split(evidence.drawn, cells, evidence.groups):
        found = find_heads(evidence.only(rest), method, count=count, k=k)
        scores[fold] = found.scores(evidence.drawn[fold], evidence.num_heads)
    return scores


def _check_groups(evidence: Evidence) -> None:
    for kind, rows in (("benign texts", ~evidence.attack), ("attacks", evidence.attack)):
        groups = {group for group, here in zip(evidence.groups, rows, strict=True) if here}
        if len(groups) < 2:
            raise DataError(
                f"the {kind} are of {len(groups)} context, and two or more are needed, because "
                "each is scored by heads found without its context: give texts with other values "
                "of context_id, or leave context_id out where texts have nothing in common."
            )
    if len(evidence.attack) < 2 * FOLDS:
        raise DataError(
            f"{len(evidence.attack)} texts are too few to hold {FOLDS} parts of them out: give "
            f"{2 * FOLDS} or more."
        )


def auroc(scores: np.ndarray, attack: np.ndarray) -> float:
    """The chance that an attack scores above a benign text; NaN where one kind is missing."""
    if attack.all() or not attack.any():
        return float("nan")
    return float(_scikit("metrics").roc_auc_score(attack, scores))


def _scikit(module: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"sklearn.{module}")
    except ImportError as error:
        raise MissingDependencyError(
            f"finding injection heads needs scikit-learn ({error}). To install it: "
            "pip install 'core-rerank[injection]'."
        ) from None


def _head(column: int, num_heads: int) -> Head:
    return Head(*divmod(column, num_heads))
