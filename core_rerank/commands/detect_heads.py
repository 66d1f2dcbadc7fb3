"""``core-rerank detect-heads``: find a model's retrieval heads and write them to a file."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_rerank.head_detection import DEFAULT_HEADS, Selection, find_heads
from core_rerank.head_measuring import MeasureSettings
from core_rerank.head_picture import draw_detection
from core_rerank.head_store import MANIFEST, AttentionStore
from core_rerank.pictures import can_draw, check_picture

from .detect_injection_heads import TaskName, TaskOption
from .detection_tables import heads_table, quality_table, stability_line
from .options import (
    DEFAULT_MODEL,
    Backend,
    BackendOption,
    DetectionWindowOption,
    VerboseOption,
    check_model,
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
    from core_rerank.head_attention import HeadAttention
    from core_rerank.labelled_queries import LabelledQuery

# All heads are read in one prefill step, which must hold a prompt of many documents.
LISTWISE_STEP_TOKENS = 16384
DEFAULT_NEGATIVES = 19
_DEFAULTS = Selection()
_OF_MEASURING = ("split", "limit", "negatives", "window", "rows", "orders", "seed", "backend")


class MethodName(StrEnum):
    """How heads are chosen."""

    CORE = "core"
    QR = "qr"
    NDCG = "ndcg"
    WEIGHTED = "weighted"
    SIGNED = "signed"


class RowsName(StrEnum):
    """The tokens that look at the documents."""

    QUERY = "query"
    INSTRUCTION = "instruction"


def detect_heads(
    context: typer.Context,
    task: TaskOption = TaskName.RANKING,  # the other is another command: see cli
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="BEIR folder: corpus.jsonl, queries.jsonl, and candidates.jsonl with rows "
            '{"query-id", "positives", "negatives"}, or qrels (see --split).',
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="YAML", help="The head set to write.")
    ] = Path("heads.yaml"),
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            callback=lambda value: value if value is None else check_model(value),
            help="Alias (see `models`), Hugging Face id or local folder. "
            f"[default: {DEFAULT_MODEL}]",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            metavar="NAME",
            help="Take qrels/NAME.tsv, and BM25's best unjudged documents as hard negatives, "
            "instead of candidates.jsonl.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Use the first so many queries.")
    ] = None,
    negatives: Annotated[
        int | None,
        typer.Option(
            "--negatives",
            min=1,
            help="Use so many hard negatives a query. Default: all of candidates.jsonl; "
            f"{DEFAULT_NEGATIVES} with --split.",
        ),
    ] = None,
    window: DetectionWindowOption = "1",
    rows: Annotated[
        RowsName,
        typer.Option("--rows", help="Tokens that look; instruction is for the strategy qr."),
    ] = RowsName.QUERY,
    orders: Annotated[
        int,
        typer.Option(
            "--orders",
            min=1,
            help="Orders of the documents to average over, 1 to 5; CoRe takes 5.",
        ),
    ] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the documents' order.")] = 0,
    backend: BackendOption = Backend.VLLM,
    store: Annotated[
        list[Path] | None,
        typer.Option(
            "--store",
            metavar="DIR",
            help="Where measured attention is kept: a stopped run goes on there, and without "
            "--data heads are chosen again in seconds, from several stores if it is repeated. "
            "Default: the output, ending in .store.",
        ),
    ] = None,
    method: Annotated[
        MethodName,
        typer.Option(
            "--method",
            help="core: contrastive score; qr: attention to positives; ndcg: greedy by ranking "
            "gain; weighted: sparse weights; signed: such of either sign.",
        ),
    ] = MethodName.CORE,
    top: Annotated[
        int, typer.Option("--top", "--k", min=1, help="How many heads (weighted, signed: at most).")
    ] = DEFAULT_HEADS,
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
    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture",
            metavar="PNG|SVG",
            help="A picture of scores and quality; needs core-rerank[plots]. Default: the output, "
            "ending in .png.",
        ),
    ] = None,
    notes: Annotated[str, typer.Option("--notes", help="Text to keep in the head set.")] = "",
    verbose: VerboseOption = False,
) -> None:
    """Find the heads that tell documents with the answer from near misses."""
    with errors_as_messages(verbose):
        stores = store or [output.with_suffix(".store")]
        _check_sources(context, data, store or [])
        selection = Selection(top, method.value, temperature, calibrated, per_token, max_layers)
        settings = MeasureSettings(window_value(window), rows.value, orders, seed=seed)
        check_output(output)
        picture = _picture(picture, output)
        if data is None:
            attention = _stored(stores, model, selection)
        else:
            source = _Source(data, split, limit, negatives, model or DEFAULT_MODEL, backend.value)
            attention = _measured(source, stores[0], settings, selection, verbose)
        with working("Choosing heads"):
            detection = find_heads(attention, selection)
        detection.head_set(_aliases(attention.measurement.model.name), notes).to_yaml(output)
        written = [str(output)]
        if picture is not None:
            draw_detection(detection, picture)
            written.append(str(picture))
        out().print(heads_table(detection))
        out().print(quality_table(detection))
        out().print(stability_line(detection), soft_wrap=True)
        kept = ", ".join(map(str, stores))
        say(f"written: {', '.join(written)}; what was measured is in {kept}")


def _check_sources(context: typer.Context, data: Path | None, stores: list[Path]) -> None:
    """Refuse what would have no effect: no option is silently left aside."""
    if data is None and not stores:
        raise CommandError(
            "give --data FOLDER to measure, or --store DIR to choose again from what is there."
        )
    if data is not None and len(stores) > 1:
        raise CommandError(
            "--data measures into one --store: leave out --data to choose from several."
        )
    # By name: which click typer brings, its own or the installed one, differs by version.
    sources = {name: context.get_parameter_source(name) for name in _OF_MEASURING}
    given = [f"--{n}" for n, source in sources.items() if source and source.name == "COMMANDLINE"]
    idle = given if data is None else []
    if idle:
        raise CommandError(
            f"{', '.join(idle)} cannot change what is measured already: give --data too, with "
            "another --store, to measure again."
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """What to measure with what: the command's options, unread."""

    data: Path
    split: str | None
    limit: int | None
    negatives: int | None
    model: str
    backend: str

    @property
    def name(self) -> str:
        """What the head set calls the data."""
        name = self.data.absolute().name
        return name if self.split is None else f"{name}/{self.split} with BM25 negatives"

    def queries(self) -> list[LabelledQuery]:
        from core_rerank.labelled_queries import load_labelled_queries

        if self.split is None:
            return load_labelled_queries(self.data, self.limit, self.negatives)
        from .mining import mine_hard_negatives

        count = self.negatives or DEFAULT_NEGATIVES
        return mine_hard_negatives(self.data, self.split, self.limit, count)


def _picture(given: Path | None, output: Path) -> Path | None:
    """Where to draw; None, with a line, where nobody asked and matplotlib is missing."""
    if given is None:
        if not can_draw():
            say("no picture: it needs matplotlib, pip install 'core-rerank[plots]'", "yellow")
            return None
        given = output.with_suffix(".png")
    check_picture(given)
    check_output(given)
    return given


def _stored(folders: list[Path], model: str | None, selection: Selection) -> HeadAttention:
    """What complete stores hold; ``model``, if given, must be the one they were measured on."""
    from core_rerank.head_attention import pool_attention
    from core_rerank.models import resolve_model

    stores = [AttentionStore.open(folder) for folder in folders]
    for kept in stores:
        if model is not None:
            kept.check({"model": resolve_model(model).model_id})
        selection.check(kept.measurement.model)
    return pool_attention([kept.load() for kept in stores])


def _measured(
    source: _Source,
    folder: Path,
    settings: MeasureSettings,
    selection: Selection,
    verbose: bool,
) -> HeadAttention:
    """What the store holds, once it is complete; an engine starts only if something is missing."""
    from core_rerank.head_measuring import inputs_without_engine
    from core_rerank.models import resolve_model

    queries = source.queries()
    say(f"{len(queries)} labelled queries in {source.data}, {_documents(queries)} documents")
    if (folder / MANIFEST).is_file():
        kept = AttentionStore.open(folder)
        model_id = resolve_model(source.model).model_id
        kept.check({"model": model_id, **inputs_without_engine(queries, settings)})
        selection.check(kept.measurement.model)
        missing = kept.missing()
        if not missing:
            say(f"all of them are in {folder}")
            return kept.load()
        say(f"going on in {folder}: {len(missing)} queries are missing")
    return _measure(source, queries, folder, settings, selection, verbose)


def _measure(
    source: _Source,
    queries: list[LabelledQuery],
    folder: Path,
    settings: MeasureSettings,
    selection: Selection,
    verbose: bool,
) -> HeadAttention:
    from core_rerank.backends import name_model, open_backend
    from core_rerank.head_measuring import measure_attention

    engine: dict[str, Any] = {"dtype": "float32"}
    if source.backend == "vllm" and settings.window != 1:
        engine["max_num_batched_tokens"] = LISTWISE_STEP_TOKENS
    with quiet_engine(verbose):
        resolved = name_model(source.model, source.backend)
        with working(f"Starting {source.model} on {source.backend}"):
            opened = open_backend(source.backend, resolved, None, engine)
        try:
            selection.check(opened.model)
            with counting("Reading attention, queries") as on_progress:
                return measure_attention(
                    opened.backend,
                    queries,
                    settings,
                    store=folder,
                    model=opened.model,
                    data=source.name,
                    on_progress=on_progress,
                )
        finally:
            opened.backend.close()


def _documents(queries: list[LabelledQuery]) -> int:
    return sum(len(q.positives) + len(q.negatives) for q in queries)


def _aliases(model_id: str) -> list[str]:
    from core_rerank.models import known_models

    return [known.alias for known in known_models() if known.model_id == model_id]
