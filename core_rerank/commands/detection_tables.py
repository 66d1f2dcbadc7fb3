"""What ``detect-heads`` prints: the best heads, how well they rank, and how firm the choice is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from core_rerank.head_scores import best_heads

if TYPE_CHECKING:
    from rich.table import Table

    from core_rerank.head_detection import Detection
    from core_rerank.head_scores import Quality

SHOWN = 16
_SCORES = {
    "core": "Contrastive scores",
    "weighted": "Contrastive scores and weights",
    "signed": "Contrastive scores and weights",
    "qr": "Attention to positives",
    "ndcg": "nDCG@10 of each head alone",
}


def heads_table(detection: Detection) -> Table:
    """The chosen heads in their order, then the best of the others by score, unmarked."""
    from rich.table import Table

    scores, chosen = detection.scores, detection.heads
    weights = detection.choice.weights
    others = [h for h in best_heads(scores, min(scores.size, SHOWN)) if h not in chosen]
    limit = detection.selection.max_layers
    table = Table(title=_SCORES[detection.selection.method], title_justify="left")
    if limit:
        table.title = f"{table.title}, first {limit} layers"
    for column in ("#", "Head", "Score", *(["Weight"] if weights else [])):
        table.add_column(column, justify="right")
    table.add_column("Chosen")
    for place, head in enumerate([*chosen, *others[: max(0, SHOWN - len(chosen))]]):
        taken = place < len(chosen)
        weight = f"{weights[place]:.4g}" if weights and taken else ""
        cells = [str(place + 1), str(head), f"{scores[head]:.4f}", *([weight] if weights else [])]
        table.add_row(*cells, "✓" if taken else "")
    return table


def quality_table(detection: Detection) -> Table:
    """How well the heads rank, on the queries they were chosen on and on others."""
    from rich.table import Table

    last = max(head.layer for head in detection.heads) + 1
    count, layers = len(detection.heads), detection.measurement.model.num_layers
    table = Table(
        title=f"Ranking {detection.queries} queries (no token filter)", title_justify="left"
    )
    for column in ("Heads", "nDCG@10", "MRR"):
        table.add_column(column, justify="left" if column == "Heads" else "right")

    def add(name: str, quality: Quality) -> None:
        table.add_row(name, f"{quality.ndcg_at_10:.4f}", f"{quality.mrr:.4f}")

    add(f"the {count} chosen, in {last} of {layers} layers, on these queries", detection.chosen)
    for number, quality in sorted(detection.held_out.items()):
        add(f"{number} chosen without the query ranked (5 folds)", quality)
    add(f"{count} at random (mean of 20 draws)", detection.random)
    looked = detection.selection.max_layers
    add(f"all of the first {looked} layers" if looked else "all", detection.all_heads)
    return table


def stability_line(detection: Detection) -> str:
    """How far disjoint samples agree."""
    found = detection.stability
    if found is None:
        return "Stability: too few queries to choose on disjoint samples."
    return (
        f"Stability: {found.samples} disjoint samples of {found.queries} queries share "
        f"{found.overlap:.0%} of their top {detection.selection.count} (least {found.lowest:.0%})."
    )
