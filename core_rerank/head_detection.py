"""Finds a model's retrieval heads in measured attention, and says what the choice is worth.

Attention is measured once (`head_measuring`) and kept (`head_store`), so that method, temperature,
calibration, normalisation and the number of heads can be chosen afterwards in seconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hook_runtime.specs import Head, ModelInfo

from .head_attention import HeadAttention, Measurement
from .head_methods import METHODS, Choice, Evidence, Method, choose, head_scores, most_heads
from .head_scores import Quality, random_quality
from .head_validation import Stability, counts_up_to, held_out, stability
from .heads import HeadSet

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

FEW_QUERIES = 20
DEFAULT_HEADS = 8


@dataclass(frozen=True, slots=True)
class Selection:
    """Which heads to choose from measured attention.

    Attributes:
        count: how many; "weighted" and "signed" may take fewer.
        method: "core", "qr", "ndcg", "weighted" or "signed" (see ``head_methods.choose``).
        temperature: of the contrastive softmax, in units of attention mass.
        calibrated: subtract the attention with the null query first.
        per_token: divide a document's attention by its length.
        max_layers: look only at the first so many layers, so that an engine may stop there.

    Raises:
        ValueError: a count below 1, a method that there is not, or a temperature that is not a
            finite number above 0.
    """

    count: int = DEFAULT_HEADS
    method: Method = "core"
    temperature: float = 0.01
    calibrated: bool = True
    per_token: bool = False
    max_layers: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of heads must be at least 1, not {self.count!r}.")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, not {self.method!r}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a number above 0, not {self.temperature!r}.")
        if self.max_layers is not None and self.max_layers < 1:
            raise ValueError(f"max_layers must be at least 1, not {self.max_layers!r}.")

    def check(self, model: ModelInfo) -> None:
        """ValueError if ``model`` has fewer layers or heads than asked for."""
        if self.max_layers is not None and self.max_layers > model.layers_kept:
            raise ValueError(
                f"cannot look at the first {self.max_layers} layers of {model.name}: "
                f"it has {model.layers_kept}."
            )
        layers = self.max_layers or model.layers_kept
        if self.count > layers * model.num_heads:
            raise ValueError(
                f"cannot choose {self.count} heads of {model.name}: {layers} layers of "
                f"{model.num_heads} heads are {layers * model.num_heads}."
            )
        most = most_heads(self.method, layers * model.num_heads)
        if self.count > most:
            raise ValueError(
                f"cannot choose {self.count} heads by {self.method}: it tries the best {most} "
                "only; use core or qr for more."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Detection:
    """What was found.

    Attributes:
        choice: the heads, best first, and their weights if there are any.
        scores: float64 [layers looked at, heads], what the method says of each head alone.
        chosen, random, all_heads: how well the chosen heads, as many random ones (a mean over
            draws) and all heads of the layers looked at rank the same documents. The chosen ones
            saw these labels.
        held_out: quality by number of heads, each query ranked by heads chosen without it; what to
            expect on other queries of the kind. Empty for fewer than five queries.
        stability: agreement of disjoint samples; None for few queries.
        queries, positives, negatives: how many were used.
    """

    choice: Choice
    scores: np.ndarray
    chosen: Quality
    random: Quality
    all_heads: Quality
    held_out: Mapping[int, Quality]
    stability: Stability | None
    queries: int
    positives: int
    negatives: int
    selection: Selection
    measurement: Measurement
    store_digest: str

    @property
    def heads(self) -> tuple[Head, ...]:
        """The chosen heads, best first."""
        return self.choice.heads

    def head_set(self, aliases: Sequence[str] = (), notes: str = "") -> HeadSet:
        """The heads as a file to keep, with where they come from."""
        measured, selection = self.measurement, self.selection
        model = measured.model
        uses_temperature = selection.method != "qr"
        return HeadSet(
            model=model.name,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            heads=self.heads,
            weights=self.choice.weights,
            method=selection.method,
            revision=model.revision,
            aliases=tuple(aliases),
            window=measured.window,
            calibrate=selection.calibrated,
            temperature=selection.temperature if uses_temperature else None,
            data=f"{measured.data}, {self.queries} queries",
            source="found by core-rerank detect-heads",
            notes=notes,
            scores=tuple(round(float(self.scores[head]), 6) for head in self.heads),
            found_with=self._provenance(),
        )

    def _provenance(self) -> dict[str, str]:
        measured, model = self.measurement, self.measurement.model
        found_with = {
            "per_token": str(self.selection.per_token).lower(),
            "max_layers": str(self.selection.max_layers or model.layers_kept),
            "positives": str(self.positives),
            "negatives": str(self.negatives),
            "rows": measured.rows,
            "orders": str(measured.orders),
            "max_tokens_per_doc": str(measured.max_tokens_per_doc),
            "seed": str(measured.seed),
            "data_hash": measured.data_hash,
            "prompt_hash": measured.prompt_hash,
            "backend": f"{model.backend}, {model.dtype}, {model.device}",
            **measured.versions,
        }
        if self.store_digest:
            found_with["store_hash"] = self.store_digest
        expected = self.held_out.get(self.selection.count)
        if expected is not None:
            found_with["held_out_ndcg_at_10"] = f"{expected.ndcg_at_10:.4f}"
        if self.stability is not None:
            found_with["overlap"] = (
                f"{self.stability.overlap:.2f} between {self.stability.samples} samples of "
                f"{self.stability.queries} queries"
            )
        return found_with


def find_heads(attention: HeadAttention, selection: Selection) -> Detection:
    """Choose the heads that best tell positives from hard negatives, and check the choice.

    Raises:
        ValueError: there are fewer heads or layers than asked for.
    """
    selection.check(attention.measurement.model)
    evidence = Evidence.of(
        attention,
        temperature=selection.temperature,
        calibrated=selection.calibrated,
        per_token=selection.per_token,
        max_layers=selection.max_layers,
    )
    queries = len(evidence.query_ids)
    if queries < FEW_QUERIES:
        logger.warning(
            "only %d labelled queries: the heads will depend on which ones; use %d or more",
            queries,
            FEW_QUERIES,
        )
    method, count, every = selection.method, selection.count, range(queries)
    choice = choose(method, evidence, every, [count])[count]
    positives = int(attention.positive.sum())
    return Detection(
        choice=choice,
        scores=head_scores(method, evidence),
        chosen=_quality(evidence, choice),
        random=random_quality(
            evidence.values,
            evidence.positive,
            len(choice.heads),
            seed=attention.measurement.seed,
        ),
        all_heads=_quality(evidence, None),
        held_out=held_out(method, evidence, counts_up_to(method, evidence, count)),
        stability=stability(method, evidence, count),
        queries=queries,
        positives=positives,
        negatives=int((attention.tokens > 0).sum()) - positives,
        selection=selection,
        measurement=attention.measurement,
        store_digest=attention.digest,
    )


def _quality(evidence: Evidence, choice: Choice | None) -> Quality:
    ndcg, reciprocal = evidence.ranked(choice, range(len(evidence.query_ids)))
    return Quality(float(ndcg.mean()), float(reciprocal.mean()))
