"""From measured attention to a config: heads, their threshold, and what they are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import DataError
from .injection_finding import (
    DEFAULT_HEADS,
    DEFAULT_K,
    Evidence,
    FoundHeads,
    Method,
    auroc,
    find_heads,
    held_out_scores,
)
from .injection_heads import InjectionHeads, Task
from .injection_measuring import InjectionAttention
from .injection_scoring import threshold_for

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class InjectionSelection:
    """How to choose (see ``find_heads``); ``fpr`` is what the threshold aims at.

    ``task`` is what the attention was measured for.
    """

    method: Method = "k-sigma"
    count: int = DEFAULT_HEADS
    k: float = DEFAULT_K
    max_layers: int | None = None
    fpr: float = 0.01
    task: Task = "instruction"


@dataclass(frozen=True, slots=True)
class ChosenHeads:
    """The config, and what was measured while it was made.

    Attributes:
        found: the heads as they were found.
        held_out: AUROC by data set, each text scored by heads found without its fold.
        benign: how many benign texts set the threshold; ``own`` says they were the user's.
    """

    heads: InjectionHeads
    found: FoundHeads
    held_out: dict[str, float]
    benign: int
    own: bool
    fpr: float

    def lines(self) -> list[str]:
        """What to tell the user."""
        found = self.found
        lines = [f"{len(found.heads)} heads by {found.method}: {' '.join(map(str, found.heads))}"]
        if not found.by_rule:
            lines.append(
                f"no head keeps attacks and benign texts {DEFAULT_K:g} (or --k-sigma) deviations "
                f"apart: these are the best, each beyond {found.k:.2f}"
            )
        for name, value in self.held_out.items():
            lines.append(f"{name}: AUROC {value:.3f}, held out")
        kind = "your benign texts" if self.own else "benign texts of the data, held out"
        lines.append(
            f"threshold {self.heads.threshold:.4f}: flags at most {self.fpr:.1%} of {self.benign} "
            f"{kind}"
        )
        if self.benign * self.fpr < 1:
            lines.append(
                f"warning: {self.benign} benign texts cannot show a rate of {self.fpr:.2%}; give "
                f"{math.ceil(1 / self.fpr) if self.fpr else 'many'} or more with --benign"
            )
        return lines


def choose_injection_heads(
    data: Sequence[InjectionAttention],
    benign: Sequence[InjectionAttention],
    selection: InjectionSelection,
) -> ChosenHeads:
    """Heads found on ``data``; the threshold set on ``benign``, or held out on ``data``'s own.

    Raises:
        DataError: the measurements are of different models or prompts, or of fewer layers than
            ``max_layers``; or no heads can be found on them.
        ValueError: there is nothing to compare, or no benign text.
    """
    _check_alike([*data, *benign])
    layers = selection.max_layers
    model = data[0].measurement.model
    if layers is not None and layers > model.layers_kept:
        raise DataError(
            f"max_layers is {layers}, but {model.layers_kept} layers were measured: give at most "
            "so many."
        )
    evidence = Evidence.of([(a.drawn(layers), a.attack, a.groups) for a in data], model.num_heads)
    how = {"count": selection.count, "k": selection.k}
    found = find_heads(evidence, selection.method, **how)
    held_out = held_out_scores(evidence, selection.method, **how)
    by_set = {
        a.measurement.data: auroc(held_out[evidence.sets == i], a.attack)
        for i, a in enumerate(data)
    }
    calm = held_out[~evidence.attack]
    if benign:
        calm = _scores([a.drawn(layers)[~a.attack] for a in benign], found, model.num_heads)
    heads = InjectionHeads(
        model=model.name,
        revision=model.revision,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        heads=found.heads,
        weights=found.weights,
        intercept=found.intercept,
        threshold=threshold_for(calm, selection.fpr),
        method=found.method,
        task=selection.task,
        instruction=data[0].measurement.instruction,
        data=" + ".join(a.measurement.data for a in data),
        source="found by core-rerank detect-heads --task injection",
        found_with=_provenance(data, benign, selection, found, by_set, len(calm)),
    )
    return ChosenHeads(heads, found, by_set, len(calm), bool(benign), selection.fpr)


def _scores(parts: Sequence[np.ndarray], found: FoundHeads, num_heads: int) -> np.ndarray:
    import numpy as np

    return found.scores(np.concatenate(parts), num_heads)


def _check_alike(parts: Sequence[InjectionAttention]) -> None:
    first = parts[0].measurement
    for part in parts[1:]:
        about = part.measurement
        if (about.model.name, about.model.layers_kept, about.prompt_hash) != (
            first.model.name,
            first.model.layers_kept,
            first.prompt_hash,
        ):
            raise DataError(
                f"{about.data!r} was measured on another model, other layers or another prompt "
                f"than {first.data!r}: measure both alike."
            )


def _provenance(
    data: Sequence[InjectionAttention],
    benign: Sequence[InjectionAttention],
    selection: InjectionSelection,
    found: FoundHeads,
    held_out: dict[str, float],
    calm: int,
) -> dict[str, str]:
    about = data[0].measurement
    model = about.model
    return {
        "texts": " + ".join(f"{len(a.attack)} ({int(a.attack.sum())} attacks)" for a in data),
        "held_out_auroc": " ".join(f"{value:.4f}" for value in held_out.values()),
        "max_layers": str(selection.max_layers or model.layers_kept),
        **({} if found.k is None else {"k_sigma": f"{found.k:.4g}"}),
        "fpr": f"{selection.fpr:g}",
        "threshold_on": " + ".join(a.measurement.data for a in benign) or "held-out benign texts",
        "benign_texts": str(calm),
        "data_hash": " ".join(a.measurement.data_hash for a in data),
        "prompt_hash": about.prompt_hash,
        "backend": f"{model.backend}, {model.dtype}, {model.device}",
        **about.versions,
    }
