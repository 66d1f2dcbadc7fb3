"""From attention on instruction and data to a suspicion score: small pure functions in float64.

Attention Tracker (arXiv 2411.00348) measures a head's focus, the share of its attention that stays
on the instruction: ``focus = I / (I + D)``, where I and D are what the prompt's last token pays the
instruction and the data. An attack draws heads from the instruction to the data. The paper's score
is the mean focus, low for attacks; here scores are the other way round, so that **higher is more
suspicious**: one minus that mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import NotFiniteError

if TYPE_CHECKING:
    import numpy as np


def focus(masses: np.ndarray) -> np.ndarray:
    """I / (I + D): float [..., 2] of attention on instruction and data to float64 [...].

    Raises:
        NotFiniteError: NaN or infinity, or a head that looks at neither (a sliding window that
            reaches neither of them).
    """
    import numpy as np

    masses = np.asarray(masses, dtype=np.float64)
    total = masses.sum(axis=-1)
    if not np.isfinite(total).all():
        raise NotFiniteError(
            "the engine returned attention that is not finite: no attack can be told by it. Use "
            "dtype='bfloat16' or 'float32' if float16 overflows."
        )
    if not (total > 0).all():
        raise NotFiniteError(
            "a head pays no attention to the instruction or the data, so that its focus is "
            "undefined: the text may be longer than the head's window. Choose other heads."
        )
    return masses[..., 0] / total


def suspicion(
    focus_by_head: np.ndarray,
    weights: Sequence[float] | np.ndarray | None = None,
    intercept: float = 0.0,
) -> np.ndarray:
    """The score in [0, 1], higher is more suspicious: float64 [..., heads] to [...].

    Without ``weights`` one minus the mean focus. With them, the logistic function of ``intercept``
    plus the weighted sum of ``1 - focus``: a probability among data like those that the weights
    were fitted on, where attacks and benign data count the same.
    """
    import numpy as np

    drawn = 1.0 - np.asarray(focus_by_head, dtype=np.float64)
    if weights is None:
        return drawn.mean(axis=-1)
    logits = np.clip(intercept + drawn @ np.asarray(weights, dtype=np.float64), -700.0, 700.0)
    return 1.0 / (1.0 + np.exp(-logits))


def threshold_for(benign_scores: np.ndarray, fpr: float) -> float:
    """The lowest threshold that at most a share ``fpr`` of benign scores lies above.

    Of fewer than ``1 / fpr`` scores none may: it is then the highest of them.

    Raises:
        ValueError: no scores, or a share that is not within [0, 1).
    """
    import numpy as np

    if not 0 <= fpr < 1:
        raise ValueError(f"fpr must be a share from 0 to below 1, such as 0.01, not {fpr!r}.")
    ordered = np.sort(np.asarray(benign_scores, dtype=np.float64))
    if not len(ordered):
        raise ValueError("there are no benign scores to set a threshold by.")
    # 1e-9: a product such as 0.29 * 100 falls short of the whole number that it stands for.
    allowed = math.floor(fpr * len(ordered) + 1e-9)
    return float(ordered[len(ordered) - 1 - allowed])
