"""From attention values to document scores: small pure functions, accumulated in float64.

CoRe is arXiv 2510.02219, ICR arXiv 2410.02642, QRHead arXiv 2506.09944. All three score a document
by the attention that the query's tokens pay to the document's tokens; they differ in the heads,
in the rows and in the token filter (see ``STRATEGIES``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np

FILTER_DEVIATIONS = 2.0


@dataclass(frozen=True, slots=True)
class Strategy:
    """How one paper turns attention into a score.

    Attributes:
        name: what the user calls it.
        heads: "selected" reads a head set, "all" every head of every layer.
        rows: the tokens that look: the query's text, or everything from the instruction to the
            end of the prompt.
        token_filter: leave out tokens with abnormally low calibrated attention; without
            calibration there are none.
    """

    name: str
    heads: Literal["selected", "all"]
    rows: Literal["query", "instruction"]
    token_filter: bool


STRATEGIES = {
    "core": Strategy("core", heads="selected", rows="query", token_filter=True),
    "icr": Strategy("icr", heads="all", rows="query", token_filter=True),
    "qr": Strategy("qr", heads="selected", rows="instruction", token_filter=False),
}


@dataclass(frozen=True, slots=True, eq=False)
class DocumentScore:
    """A document's score with its parts.

    Attributes:
        score: the sum of ``tokens`` where ``kept``.
        tokens: float64 [document tokens], calibrated attention.
        kept: bool [document tokens], False where the filter left a token out.
    """

    score: float
    tokens: np.ndarray
    kept: np.ndarray


def aggregate_heads(values: np.ndarray, weights: Sequence[float] | None = None) -> np.ndarray:
    """Attention of each token summed over heads: [heads, tokens] to float64 [tokens].

    ``values`` are means over the query's rows. ICR sums over all heads, CoRe and QRHead over the
    selected ones, unweighted; ``weights``, one per head, make it a weighted sum.
    """
    import numpy as np

    values = np.asarray(values, dtype=np.float64)
    if weights is None:
        return values.sum(axis=0)
    if len(weights) != values.shape[0]:
        raise ValueError(f"{len(weights)} weights were given for {values.shape[0]} heads.")
    return np.asarray(weights, dtype=np.float64) @ values


def calibrate(query: np.ndarray, null: np.ndarray) -> np.ndarray:
    """Attention under the query minus attention under the content-free query, per token.

    The calibration of ICR, used by CoRe and QRHead too; it takes away what a token attracts
    whatever is asked. Shapes: both [tokens].
    """
    return query - null


def filter_tokens(tokens: np.ndarray) -> np.ndarray:
    """True for the tokens of one document that count: not below mean - 2 standard deviations.

    The filter of ICR and CoRe against abnormally low calibrated scores. The deviation is the
    sample's (n - 1), as in their code; there, a one-token document has no deviation and scores
    zero. Here one token, or several equal ones, are all kept. Shape: [tokens] to bool [tokens].
    """
    import numpy as np

    if len(tokens) < 2 or tokens.min() == tokens.max():
        return np.ones(len(tokens), dtype=bool)
    return tokens >= tokens.mean() - FILTER_DEVIATIONS * tokens.std(ddof=1)


def score_document(tokens: np.ndarray, *, token_filter: bool) -> DocumentScore:
    """Sum of the calibrated attention of a document's kept tokens (ICR, CoRe; QRHead keeps all)."""
    import numpy as np

    kept = filter_tokens(tokens) if token_filter else np.ones(len(tokens), dtype=bool)
    return DocumentScore(float(tokens[kept].sum()), tokens, kept)
