"""``core-rerank detect-heads``: find a model's retrieval heads and write them to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_rerank.head_detection import DEFAULT_HEADS, Detection, Selection, find_heads
from core_rerank.head_scores import HeadAttention, best_heads

from .options import (
    DEFAULT_MODEL,
    Backend,
    BackendOption,
    DetectionWindowOption,
    ModelOption,
    VerboseOption,
    window_value,
)
from .terminal import (
    CommandError,
    check_output,
    counting,
    errors_as_messages,
    out,
    quiet_engine,
    say,
    working,
)

if TYPE_CHECKING:
    from rich.table import Table

    from core_rerank.heads import Window
    from core_rerank.labelled_queries import LabelledQuery

SHOWN = 16
# All heads are read in one prefill step, which must hold a prompt of many documents.
LISTWISE_STEP_TOKENS = 16384
_DEFAULTS = Selection()


def detect_heads(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="BEIR folder: corpus.jsonl, queries.jsonl, and candidates.jsonl with rows "
            '{"query-id", "positives", "negatives"}.',
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="YAML", help="The head set to write.")
    ] = Path("heads.yaml"),
    model: ModelOption = DEFAULT_MODEL,
    window: DetectionWindowOption = "1",
    top: Annotated[int, typer.Option("--top", min=1, help="How many heads.")] = DEFAULT_HEADS,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Of the contrastive softmax.")
    ] = _DEFAULTS.temperature,
    calibrated: Annotated[
        bool,
        typer.Option("--calibrated/--raw", help="Subtract the attention with the query N/A."),
    ] = _DEFAULTS.calibrated,
    per_token: Annotated[
        bool, typer.Option("--per-token/--sum", help="Divide attention by document length.")
    ] = _DEFAULTS.per_token,
    max_layers: Annotated[
        int | None,
        typer.Option("--max-layers", min=1, help="Look at the first so many layers only."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use the first so many queries.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the documents' order.")] = 0,
    backend: BackendOption = Backend.VLLM,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="NPZ", help="Keep what was measured, for --reuse."),
    ] = None,
    reuse: Annotated[
        Path | None,
        typer.Option(
            "--reuse",
            metavar="NPZ",
            help="Choose heads again from what --save kept, in seconds; no --data needed.",
        ),
    ] = None,
    notes: Annotated[str, typer.Option("--notes", help="Text to keep in the head set.")] = "",
    verbose: VerboseOption = False,
) -> None:
    """Find the heads that tell documents with the answer from near misses (CoRe)."""
    with errors_as_messages(verbose):
        if (data is None) == (reuse is None):
            raise CommandError("give either --data FOLDER or --reuse NPZ.")
        for path in (output, save):
            if path is not None:
                check_output(path)
        selection = Selection(top, temperature, calibrated, per_token, max_layers)
        if reuse is not None:
            attention = HeadAttention.load(reuse)
        else:
            assert data is not None
            attention = _measure(
                data,
                limit,
                model,
                backend.value,
                window_value(window),
                seed,
                selection,
                verbose,
            )
            if save is not None:
                attention.save(save)
        detection = find_heads(attention, selection)
        aliases = _aliases(attention.measurement.model.name)
        detection.head_set(aliases, notes).to_yaml(output)
        part = f", first {max_layers} layers" if max_layers else ""
        out().print(f"Contrastive scores{part}:")
        out().print(heads_table(detection))
        queries = f"{detection.queries} queries"
        out().print(f"Ranking {queries}, those the heads were chosen on (no token filter):")
        out().print(quality_table(detection))
        say(f"written: {output}")


def _measure(
    data: Path,
    limit: int | None,
    model: str,
    backend: str,
    window: Window,
    seed: int,
    selection: Selection,
    verbose: bool,
) -> HeadAttention:
    from core_rerank.backends import name_model, open_backend
    from core_rerank.head_detection import measure_attention
    from core_rerank.labelled_queries import load_labelled_queries

    queries = load_labelled_queries(data, limit)
    say(f"{len(queries)} labelled queries in {data}, {_documents(queries)} documents to read")
    engine: dict[str, Any] = {"dtype": "float32"}
    if backend == "vllm" and window != 1:
        engine["max_num_batched_tokens"] = LISTWISE_STEP_TOKENS
    with quiet_engine(verbose):
        resolved = name_model(model, backend)
        with working(f"Starting {model} on {backend}"):
            opened = open_backend(backend, resolved, None, engine)
        try:
            selection.check(opened.model)
            with counting("Reading attention, prompts") as on_progress:
                attention = measure_attention(
                    opened.backend,
                    queries,
                    data=data.absolute().name,
                    window=window,
                    seed=seed,
                    on_progress=on_progress,
                )
        finally:
            opened.backend.close()
    return replace(attention, measurement=replace(attention.measurement, model=opened.model))


def _documents(queries: list[LabelledQuery]) -> int:
    return sum(len(q.positives) + len(q.negatives) for q in queries)


def _aliases(model_id: str) -> list[str]:
    from core_rerank.models import known_models

    return [known.alias for known in known_models() if known.model_id == model_id]


def heads_table(detection: Detection) -> Table:
    """The best heads of the layers that were looked at; the chosen ones are marked."""
    from rich.table import Table

    limit = detection.selection.max_layers
    count = min(max(SHOWN, len(detection.heads)), detection.scores[:limit].size)
    table = Table()
    for column in ("#", "Head", "Score", "Chosen"):
        table.add_column(column, justify="left" if column == "Chosen" else "right")
    for rank, head in enumerate(best_heads(detection.scores, count, limit), start=1):
        mark = "✓" if head in detection.heads else ""
        table.add_row(str(rank), str(head), f"{detection.scores[head]:.4f}", mark)
    return table


def quality_table(detection: Detection) -> Table:
    """How well the heads rank the documents they were chosen on."""
    from rich.table import Table

    last = max(head.layer for head in detection.heads) + 1
    count, layers = len(detection.heads), detection.measurement.model.num_layers
    table = Table()
    for column in ("Heads", "nDCG@10", "MRR"):
        table.add_column(column, justify="left" if column == "Heads" else "right")
    for name, quality in (
        (f"the {count} chosen, in {last} of {layers} layers", detection.chosen),
        (f"{count} at random (mean of 20 draws)", detection.random),
        ("all", detection.all_heads),
    ):
        table.add_row(name, f"{quality.ndcg_at_10:.4f}", f"{quality.mrr:.4f}")
    return table
