"""``core-rerank eval``: rerank a BEIR collection with several systems and compare them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core_rerank.fusion import Fusion

from .evaluation_table import print_evaluation
from .options import (
    DEFAULT_MODEL,
    Backend,
    BackendOption,
    DtypeOption,
    HeadsOption,
    ModelOption,
    Strategy,
    VerboseOption,
    WindowOption,
    window_value,
)
from .terminal import (
    FAILURE,
    CommandError,
    err,
    errors_as_messages,
    quiet_engine,
    say,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

EVAL = "core_rerank.eval"


def evaluate(
    dataset: Annotated[
        str,
        typer.Option(
            "--dataset",
            metavar="PATH|NAME",
            help="A BEIR folder, or a collection of BEIR, such as scifact, fetched if need be.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="For the results. A run that was stopped goes on there by the same command.",
        ),
    ],
    split: Annotated[
        str, typer.Option("--split", metavar="NAME", help="Judgements: qrels/NAME.tsv.")
    ] = "test",
    qrels: Annotated[
        Path | None,
        typer.Option("--qrels", metavar="FILE", help="Judgements from there; TREC's form too."),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", metavar="DIR", help="Where collections are fetched to."),
    ] = None,
    retriever: Annotated[
        str,
        typer.Option(
            "--retriever",
            "-r",
            metavar="bm25|dense|hybrid|run:FILE",
            help="The first stage; a run's file may lie in the data set's folder.",
        ),
    ] = "bm25",
    index: Annotated[
        Path | None,
        typer.Option("--index", metavar="DIR", help="Keep the first stage's index there."),
    ] = None,
    depth: Annotated[int, typer.Option("--depth", min=1, help="Candidates a query.")] = 40,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first so many judged queries.")
    ] = None,
    model: ModelOption = DEFAULT_MODEL,
    heads_config: HeadsOption = None,
    window: WindowOption = None,
    strategy: Annotated[
        Strategy, typer.Option("--strategy", help="The main system's scoring.")
    ] = Strategy.CORE,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            "-c",
            metavar="SYSTEM",
            help="Another system; may be repeated: core, qr, icr (each :pointwise, :listwise or "
            ":N), pointwise, listwise, random-heads[:SEED], cross-encoder[:MODEL], rankgpt, "
            "fusion[:rrf|WEIGHT]. The first stage is always there.",
        ),
    ] = None,
    fusion: Annotated[
        str,
        typer.Option(
            "--fusion",
            metavar="none|rrf|WEIGHT",
            help="Show every reranker fused with the first stage too; WEIGHT is the reranker's.",
        ),
    ] = "none",
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Queries ranked together; a stop loses as many.")
    ] = 8,
    relevance_level: Annotated[
        int,
        typer.Option(
            "--relevance-level",
            min=1,
            help="Relevant from there up, to MAP, MRR and recall; 2 is usual for TREC DL.",
        ),
    ] = 1,
    ignore_identical_ids: Annotated[
        bool | None,
        typer.Option(
            "--ignore-identical-ids/--keep-identical-ids",
            help="Take away the document whose id is the query's. Default: on ArguAna and Quora.",
            show_default=False,
        ),
    ] = None,
    backend: BackendOption = Backend.VLLM,
    dtype: DtypeOption = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME=VALUE",
            help="An argument of the engine, such as max_model_len=8192; may be repeated.",
        ),
    ] = None,
    verbose: VerboseOption = False,
) -> None:
    """Rerank the candidates of a collection's queries, and measure every system alike."""
    with errors_as_messages(verbose):
        fused = None if fusion == "none" else Fusion.parse(fusion)
        options = _engine_options(engine or [])
        module = import_module(EVAL)
        folder = module.find_collection(dataset, data_dir)
        data = module.load_beir(folder, split, qrels=qrels, stream=True).first(limit)
        with quiet_engine(verbose):
            named = {
                "strategy": strategy.value,
                "window": window_value(window) if window else None,
                "config": heads_config,
                "backend": backend.value,
                **({"dtype": dtype.value} if dtype else {}),
            }
            if both := sorted({"model", *named} & options.keys()):
                raise CommandError(
                    f"--engine cannot give {', '.join(both)}: use the command's own option."
                )
            main = module.attention_system(model, **named, **options)
            systems = module.name_systems(main, compare or [], fused)
            candidates = module.find_candidates(
                data,
                _beside(retriever, folder),
                depth,
                ignore_identical_ids=ignore_identical_ids,
                index=index,
                keep=output,
                progress=err().is_terminal,
            )
            _announce(data, candidates, systems)
            report = module.evaluate(
                data,
                systems,
                candidates,
                output=output,
                batch=batch,
                relevance_level=relevance_level,
                progress=True,
            )
        print_evaluation(report)
        say(f"written: {output}/metrics.json, per_query.csv, report.html and run-*.trec")
        _tell_failures(report)


def _engine_options(given: Sequence[str]) -> dict[str, Any]:
    """``name=value`` as arguments; values are read as YAML reads them (numbers, true, text)."""
    import yaml

    options: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"--engine takes NAME=VALUE, not {text!r}.")
        try:
            options[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            options[name] = value
    return options


def _beside(retriever: str, folder: Path) -> str:
    """A run's file, looked for here and then in the data set's folder."""
    name = retriever.removeprefix("run:")
    beside = folder / name
    named = name != retriever and not Path(name).is_file() and beside.is_file()
    return f"run:{beside}" if named else retriever


def _announce(data: Any, candidates: Any, systems: Sequence[Any]) -> None:
    taken = candidates.settings["identical_ids_removed"]
    say(
        f"{data.name}: {len(data.queries)} judged queries, {candidates.corpus['documents']} "
        f"documents, {candidates.retriever} top {candidates.depth}; documents whose id is the "
        f"query's are {'taken away' if taken else 'kept'}"
    )
    say(f"systems: first-stage, {', '.join(system.name for system in systems)}")


def _tell_failures(report: Any) -> None:
    """A line for each system with failures; an error where one ranked nothing at all."""
    for system in report.systems:
        if system.failed:
            query_id, reason = next(iter(system.failed.items()))
            say(
                f"warning: {system.name} failed on {len(system.failed)} of "
                f"{len(report.dataset.queries)} queries, which count 0; the first is {query_id}: "
                f"{reason}",
                "yellow",
            )
    empty = [system.name for system in report.systems if system.failed and not system.run]
    if empty:
        raise CommandError(f"no query could be ranked by {', '.join(empty)}.", FAILURE)
