"""Compares the ways to choose heads on stored attention: nDCG@10 of queries not used to choose.

    python -m core_rerank.eval.head_methods STORE [STORE ...] --output head-methods.md

A store is what ``core-rerank detect-heads --store`` keeps. No engine is started. Of several stores,
each is also ranked by heads chosen on all the others.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from core_rerank.head_attention import HeadAttention, pool_attention
from core_rerank.head_methods import METHODS, Evidence, Method, choose
from core_rerank.head_scores import RANDOM_DRAWS, random_quality
from core_rerank.head_store import AttentionStore
from core_rerank.head_validation import (
    COUNTS,
    counts_up_to,
    held_out_by_query,
    stability,
)

from .files import write_whole
from .significance import paired_bootstrap

if TYPE_CHECKING:
    import numpy as np

TEMPERATURE = 0.01
STABILITY_HEADS = 8


def compare(attention: HeadAttention, temperature: float, max_layers: int | None = None) -> str:
    """A section in Markdown: every method by every number of heads, against all and random heads.

    Each query is ranked by heads chosen on the other four folds. The interval is of the difference
    to core with as many heads, paired over queries (bootstrap, 95 %).
    """
    evidence = Evidence.of(attention, temperature=temperature, max_layers=max_layers)
    measured = attention.measurement
    layers = f", first {max_layers} layers" if max_layers else ""
    every = evidence.num_heads
    header = [str(count) for count in COUNTS] + [f"all {every}"]
    lines = [
        f"## {_name(attention)}{layers}",
        "",
        f"{int(attention.positive.sum())} positives, "
        f"{int((attention.tokens > 0).sum() - attention.positive.sum())} negatives; "
        f"{measured.model.name} on {measured.model.backend}, {measured.model.dtype}; "
        f"temperature {temperature:g}; store {attention.digest}.",
        "",
        _row(["k", *header, f"overlap of top {STABILITY_HEADS}"]),
        _row(["---"] * (len(header) + 2)),
    ]
    found = {m: held_out_by_query(m, evidence, counts_up_to(m, evidence)) for m in METHODS}
    for method in METHODS:
        cells = [_cell(found, count, method) for count in (*COUNTS, every)]
        lines.append(_row([method, *cells, _overlap(method, evidence)]))
    random = [_random(evidence, count) for count in (*COUNTS, every)]
    lines.append(_row([f"random heads, mean of {RANDOM_DRAWS} draws", *random, ""]))
    return "\n".join(lines) + "\n"


def transfer(
    others: Sequence[HeadAttention],
    target: HeadAttention,
    temperature: float,
    max_layers: int | None = None,
) -> str:
    """A section in Markdown: heads chosen on all queries of ``others``, ranking ``target``.

    Raises:
        ValueError: they are not of one model, or not measured alike (see ``pool_attention``).
    """
    layers = min(
        max_layers or target.measurement.model.num_layers,
        *(part.measurement.model.layers_kept for part in (*others, target)),
    )
    pool_attention([*others, target])  # refuses what cannot be compared
    chosen_on, ranked = (
        Evidence.of(attention, temperature=temperature, max_layers=layers)
        for attention in (pool_attention(others), target)
    )
    queries = range(len(ranked.query_ids))
    names = " and ".join(map(_name, others))
    lines = [
        f"## Chosen on {names}, ranking {_name(target)}, first {layers} layers",
        "",
        _row(["k", *map(str, COUNTS)]),
        _row(["---"] * (len(COUNTS) + 1)),
    ]
    for method in METHODS:
        choices = choose(method, chosen_on, range(len(chosen_on.query_ids)), COUNTS)
        cells = [f"{ranked.ranked(choices[k], queries)[0].mean():.3f}" for k in COUNTS]
        lines.append(_row([method, *cells]))
    every = f"{ranked.ranked(None, queries)[0].mean():.3f}"
    return "\n".join([*lines, "", f"All heads: {every}."]) + "\n"


def _name(attention: HeadAttention) -> str:
    measured = attention.measurement
    window = "pointwise" if measured.window == 1 else f"window {measured.window}"
    return f"{measured.data} ({len(measured.query_ids)} queries, {window})"


def _cell(
    found: Mapping[str, Mapping[int, tuple[np.ndarray, np.ndarray]]], count: int, method: Method
) -> str:
    """Mean nDCG@10 of ``method`` with ``count`` heads, and how far it may be from core's."""
    if count not in found[method]:
        return ""
    ndcg = found[method][count][0]
    if method == "core":
        return f"{ndcg.mean():.3f}"
    low, high = paired_bootstrap(list(ndcg - found["core"][count][0]))
    return f"{ndcg.mean():.3f} ({low:+.3f} to {high:+.3f})"


def _overlap(method: Method, evidence: Evidence) -> str:
    found = stability(method, evidence, STABILITY_HEADS)
    return "" if found is None else f"{found.overlap:.2f} ({found.samples} x {found.queries})"


def _random(evidence: Evidence, count: int) -> str:
    quality = random_quality(evidence.values, evidence.positive, count, seed=evidence.seed)
    return f"{quality.ndcg_at_10:.3f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("stores", nargs="+", type=Path, metavar="STORE")
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--max-layers", type=int, default=None)
    parser.add_argument("--output", type=Path, default=None, help="default: print")
    given = parser.parse_args(arguments)
    stores = [AttentionStore.open(folder) for folder in given.stores]
    settings = (given.temperature, given.max_layers)
    measured = [store.load() for store in stores]
    sections = [compare(attention, *settings) for attention in measured]
    for target in measured:
        others = [attention for attention in measured if attention is not target]
        if others:
            sections.append(transfer(others, target, *settings))
    text = "\n".join(sections)
    if given.output is None:
        print(text)
    else:
        write_whole(given.output, text)


if __name__ == "__main__":
    main()
