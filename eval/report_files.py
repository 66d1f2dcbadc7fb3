"""A report as files: TREC runs, metrics.json, per_query.csv and report.html."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from .candidates import RETRIEVERS
from .files import digest, file_name, write_whole
from .measures import MISSING_RULE, TIE_RULE, measure_names
from .report import Report, SystemReport
from .significance import BOOTSTRAP_SAMPLES, CONFIDENCE, PERMUTATIONS, SEED

SCHEMA = 1


def write_report(report: Report, folder: Path) -> None:
    """Write every file, each whole or not at all; replaces those of an earlier report.

    - ``run-SYSTEM.trec``: one for each system, ``run-first-stage.trec`` included;
    - ``metrics.json``: settings, versions and means; ``docs/evaluation.md`` says what is in it;
    - ``per_query.csv``: every measure of every query and system, and what failed;
    - ``report.html``: tables and pictures, in one file.
    """
    from .report_page import render_report

    for system in report.systems:
        write_whole(folder / run_name(system.name), _trec(system))
    metrics = report_metrics(report)
    write_whole(folder / "per_query.csv", per_query_table(report))
    write_whole(folder / "report.html", render_report(report, metrics))
    write_whole(folder / "metrics.json", json.dumps(metrics, indent=1, ensure_ascii=False) + "\n")


def run_name(system: str) -> str:
    """The file of a system's run."""
    return f"run-{file_name(system)}.trec"


def report_metrics(report: Report) -> dict[str, Any]:
    """What ``metrics.json`` holds; ``docs/evaluation.md`` is its schema."""
    dataset, candidates = report.dataset, report.candidates
    return {
        "schema": SCHEMA,
        "data": {
            "name": dataset.name,
            "queries": len(dataset.queries),
            "queries_hash": digest(dataset.queries),
            "qrels_hash": digest(dataset.qrels),
            "corpus": candidates.corpus,
        },
        "first_stage": {
            "retriever": candidates.retriever,
            "settings": candidates.settings,
            "depth": candidates.depth,
            "candidates_hash": candidates.digest,
            "queries_without_candidates": [
                query_id for query_id in dataset.queries if not candidates.run.get(query_id)
            ],
        },
        "rules": {
            "relevance_level": report.relevance_level,
            "identical_ids_removed": candidates.settings.get("identical_ids_removed"),
            "ties": TIE_RULE,
            "missing": MISSING_RULE,
        },
        "statistics": {
            "confidence": CONFIDENCE,
            "bootstrap_samples": BOOTSTRAP_SAMPLES,
            "permutations": PERMUTATIONS,
            "seed": SEED,
        },
        "batch": report.batch,
        "systems": [_system(system) for system in report.systems],
        "environment": {**report.environment, "gpus": _gpus(report)},
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _system(system: SystemReport) -> dict[str, Any]:
    comparison = system.comparison
    return {
        "name": system.name,
        "run": run_name(system.name),
        "settings": system.settings,
        "engine": system.facts,
        "measures": system.means,
        "interval": list(system.interval),
        "against_first_stage": None if comparison is None else asdict(comparison),
        "depth_curve": {str(depth): value for depth, value in system.depth_curve.items()},
        "depth_curve_exact": system.depth_curve_exact,
        "length_correlation": system.length_correlation,
        "failed_queries": system.failed,
        "mended_answers": system.mended,
        "cost": asdict(system.cost),
    }


def per_query_table(report: Report) -> str:
    """``per_query.csv``: a row for each query and system."""
    names = measure_names(report.candidates.depth)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["query_id", "system", "status", *names, "candidates", "error"])
    for query_id in report.dataset.queries:
        found = len(report.candidates.run.get(query_id, ()))
        for system in report.systems:
            error = system.failed.get(query_id, "")
            status = "failed" if error else "ok" if found else "no candidates"
            values = [f"{system.measures[name][query_id]:.6f}" for name in names]
            writer.writerow([query_id, system.name, status, *values, found, error])
    return text.getvalue()


def _trec(system: SystemReport) -> str:
    lines: Iterator[str] = import_module(RETRIEVERS).run_lines(system.run, file_name(system.name))
    return "".join(f"{line}\n" for line in lines)


def _gpus(report: Report) -> list[str]:
    """Names of the GPUs here, if a system ran on one."""
    if not any(str(system.facts.get("device", "")).startswith("cuda") for system in report.systems):
        return []
    import torch

    count = torch.cuda.device_count()
    return [torch.cuda.get_device_properties(i).name for i in range(count)]
