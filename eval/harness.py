"""Rerank a first stage's candidates with several systems, and measure all of them alike."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from core_rerank.errors import DataError, NotFiniteError
from core_rerank.inputs import check_count

from .bench_report import environment
from .candidates import Candidates, find_candidates
from .data import Dataset
from .engines import Engines
from .files import digest, file_name, make_folder
from .journal import Journal, Outcome
from .report import (
    FIRST_STAGE,
    Rankings,
    Report,
    SystemReport,
    first_stage_rankings,
    report_system,
)
from .report_files import write_report
from .rivals.base import Ranker, Task
from .systems import FusedSystem, System, by_engine, engines_for

DEFAULT_BATCH = 8
JOURNALS = "journal"
WARM_UP: Task = ("warm-up", ["A document that is ranked before the clock starts."])


def evaluate(
    dataset: Dataset,
    systems: Sequence[System | FusedSystem],
    candidates: Candidates | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    batch: int = DEFAULT_BATCH,
    relevance_level: int = 1,
    progress: bool = False,
) -> Report:
    """Rank every query's candidates with every system, one system after the other.

    Args:
        dataset: see ``load_beir``.
        systems: see ``attention_system`` and ``name_systems``; a fusion needs the system it fuses.
        candidates: the first stage's; by default BM25's top 40. The first stage is in the report
            as ``first-stage``.
        output: a folder for the report's files (see ``write_report``) and, as they come, the
            rankings: called again with the same arguments after it was stopped, it goes on. None
            keeps everything in memory.
        batch: queries ranked together: what a stop can lose, and what keeps an engine full.
        relevance_level: see ``measure_run``.
        progress: show bars on stderr, with the time left.

    A query whose ranking fails (its prompt does not fit, its scores are not finite) is noted with
    the reason and counts 0; what stops an engine stops the evaluation.

    Raises:
        DataError: ``output`` was made with other settings (names them), is damaged or in use.
        ValueError: two systems have one name, or a fusion's system is not there.
        ModelError, MissingDependencyError, HookRuntimeError: a system could not be started.
    """
    _check(systems)
    batch = check_count("batch", batch)
    if candidates is None:
        candidates = find_candidates(dataset, progress=progress)
    folder = None if output is None else Path(output)
    with nullcontext() if folder is None else _in_use(folder):
        journals = _open_journals(dataset, candidates, systems, folder, batch)
        waiting = _waiting(systems, journals)
        with engines_for(waiting) as engines:
            _rank_missing(dataset, candidates, waiting, journals, engines, progress)
        report = _report(dataset, candidates, systems, journals, batch, relevance_level)
        if folder is not None:
            write_report(report, folder)
    return report


def rank(
    dataset: Dataset,
    systems: Sequence[System],
    candidates: Candidates,
    engines: Engines,
    *,
    output: str | os.PathLike[str],
    batch: int = DEFAULT_BATCH,
    progress: bool = False,
) -> None:
    """Only rank, on engines that stay open for the next collection; ``evaluate`` measures later.

    Arguments and errors are those of ``evaluate``, to be called with the same ``output``.
    """
    _check(systems)
    batch, folder = check_count("batch", batch), Path(output)
    with _in_use(folder):
        journals = _open_journals(dataset, candidates, systems, folder, batch)
        waiting = _waiting(systems, journals)
        _rank_missing(dataset, candidates, waiting, journals, engines, progress)


def _check(systems: Sequence[System | FusedSystem]) -> None:
    if not systems:
        raise ValueError("there is no system to evaluate: give at least one.")
    taken = {file_name(FIRST_STAGE)}
    ranked = {system.name for system in systems if not isinstance(system, FusedSystem)}
    for system in systems:
        name = file_name(system.name)
        if name in taken:
            raise ValueError(f"two systems would have files called {name!r}: give another name.")
        taken.add(name)
        if isinstance(system, FusedSystem) and system.of not in ranked:
            raise ValueError(
                f"{system.name} fuses {system.of!r}, which is not among the systems "
                f"({', '.join(sorted(ranked))}): evaluate it too, or leave the fusion out."
            )


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder."""
    from filelock import FileLock, Timeout

    make_folder(folder)
    make_folder(folder / JOURNALS)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise DataError(
            f"another process is evaluating into {folder}: wait for it, or give another folder."
        ) from None


def _open_journals(
    dataset: Dataset,
    candidates: Candidates,
    systems: Sequence[System | FusedSystem],
    folder: Path | None,
    batch: int,
) -> dict[str, Journal]:
    """All of them before anything is ranked, so that other settings are refused at once."""
    query_ids = [query_id for query_id in dataset.queries if candidates.run.get(query_id)]
    common = {
        "first_stage": candidates.settings,
        "candidates": candidates.digest,
        "queries": digest({query_id: dataset.queries[query_id] for query_id in query_ids}),
        "batch": batch,
        "versions": environment()["versions"],
    }
    return {
        system.name: Journal(
            None if folder is None else folder / JOURNALS / f"{file_name(system.name)}.jsonl",
            {**common, "system": {"name": system.name, **system.settings}},
            query_ids,
            batch,
        )
        for system in systems
        if not isinstance(system, FusedSystem)
    }


def _waiting(systems: Sequence[System | FusedSystem], journals: dict[str, Journal]) -> list[System]:
    """Those that have queries left to rank."""
    return [s for s in systems if not isinstance(s, FusedSystem) and journals[s.name].missing]


def _rank_missing(
    dataset: Dataset,
    candidates: Candidates,
    waiting: Sequence[System],
    journals: dict[str, Journal],
    engines: Engines,
    progress: bool,
) -> None:
    """Systems that share an engine follow each other."""
    for group in by_engine(waiting):
        for system in group:
            _rank(system, engines, journals[system.name], dataset, candidates, progress)


def _rank(
    system: System,
    engines: Engines,
    journal: Journal,
    dataset: Dataset,
    candidates: Candidates,
    progress: bool,
) -> None:
    from tqdm import tqdm

    batches, done = journal.missing, len(journal.outcomes)
    with tqdm(
        total=done + sum(map(len, batches)),
        initial=done,
        desc=f"{system.name} (starting)",
        unit="query",
        mininterval=0.5 if sys.stderr.isatty() else 30.0,  # seconds between lines of a log
        disable=not progress,
    ) as bar:
        started = system.start(engines.get(system.need))
        journal.begin(started.facts)
        started.ranker.rank(*WARM_UP)
        bar.set_description(system.name)
        bar.unpause()  # the time left is estimated from ranking alone
        for query_ids in batches:
            tasks = [
                (
                    dataset.queries[query_id],
                    [candidates.documents[d].full_text for d in candidates.run[query_id]],
                )
                for query_id in query_ids
            ]
            journal.add(_rank_batch(started.ranker, query_ids, tasks))
            bar.update(len(query_ids))


def _rank_batch(ranker: Ranker, query_ids: Sequence[str], tasks: Sequence[Task]) -> list[Outcome]:
    """The batch's outcomes; where it fails, each query is ranked alone to find the one at fault."""
    try:
        results = ranker.rank_batch(tasks)
    except (ValueError, NotFiniteError) as error:
        if len(tasks) == 1:
            return [Outcome(query_ids[0], None, f"{type(error).__name__}: {error}")]
        pairs = zip(query_ids, tasks, strict=True)
        return [outcome for q, task in pairs for outcome in _rank_batch(ranker, [q], [task])]
    return [
        Outcome(query_id, result)
        if all(map(math.isfinite, result.scores or ()))
        else Outcome(query_id, None, "NotFiniteError: a score is NaN or infinite")
        for query_id, result in zip(query_ids, results, strict=True)
    ]


def _report(
    dataset: Dataset,
    candidates: Candidates,
    systems: Sequence[System | FusedSystem],
    journals: dict[str, Journal],
    batch: int,
    relevance_level: int,
) -> Report:
    def measure(name: str, rankings: Rankings, **about: Any) -> SystemReport:
        return report_system(
            name, rankings, dataset, candidates, relevance_level=relevance_level, **about
        )

    first = measure(
        FIRST_STAGE,
        first_stage_rankings(candidates),
        settings={"kind": "first-stage", **candidates.settings},
        facts={},
        pointwise=True,
    )
    pointwise = {s.name: s.pointwise for s in systems if not isinstance(s, FusedSystem)}
    measured = [first]
    for system in systems:
        fused = isinstance(system, FusedSystem)
        base = system.of if fused else system.name
        journal = journals[base]
        rankings = Rankings(
            candidates.run,
            {o.query_id: o.result for o in journal.outcomes if o.result is not None},
            system.fusion if fused else None,
            {o.query_id: o.error for o in journal.outcomes if o.result is None},
        )
        measured.append(
            measure(
                system.name,
                rankings,
                settings=system.settings,
                facts=journal.facts or {},
                pointwise=pointwise[base],
                first_stage=first,
            )
        )
    return Report(dataset, candidates, tuple(measured), batch, relevance_level, environment())
