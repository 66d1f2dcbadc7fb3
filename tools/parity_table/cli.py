"""The command line: which rows to run, where, and for how long."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import about
from .scenarios import SCENARIOS, Scenario
from .table import Row, planned, print_table, read_rows, write_json

if TYPE_CHECKING:
    from .models import Models


def main(root: Path, argv: Sequence[str] | None = None) -> int:
    """Run, print, write; 1 if a row failed."""
    arguments = _parser().parse_args(argv)
    jobs = _jobs(arguments)
    if not jobs:
        print("no row matches --only and --models", file=sys.stderr)
        return 2
    if arguments.list:
        _list(jobs, arguments.device)
        return 0
    hardware = about.hardware(arguments.device)
    gpus: list[str] = hardware.get("gpus", [])
    if arguments.device == "gpu" and not gpus:
        print("torch sees no GPU here: use --device cpu", file=sys.stderr)
        return 2
    from .worker_process import defaults

    name = f"parity-{about.slug(arguments.device, gpus)}.json"
    path = arguments.out or root / "eval" / "results" / name
    stamp = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": arguments.commit or about.commit(root),
    }
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        **stamp,
        "device": arguments.device,
        "engine_defaults": defaults(arguments.device),
        "versions": about.versions(),
        "hardware": hardware,
    }
    rows = _all_rows(jobs, read_rows(path) if arguments.merge else {}, arguments.device)

    writing = threading.Lock()  # rows are judged in a thread of its own

    def write() -> None:
        with writing:
            write_json(rows, path, facts)

    write()
    from .drive import Driver

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        models = _models(arguments, Path(folder))
        try:
            with Driver(
                models, arguments.device, len(gpus), arguments.budget_s, root, stamp
            ) as driver:
                driver.run(jobs, write)
        finally:
            write()
            if arguments.keep_logs:
                _keep_logs(Path(folder), arguments.keep_logs)
    print_table([r for _, found in jobs for r in found], f"parity on {arguments.device}")
    print(f"{time.monotonic() - begun:.0f} s; written to {path}")
    return int(any(row.failed for _, found in jobs for row in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python tools/parity_table",
        description="Captures of real engines under every condition, against transformers.",
    )
    options: dict[str, dict[str, Any]] = {
        "--device": {"choices": ("cpu", "gpu"), "default": "cpu"},
        "--only": {"help": "regular expression, looked for in 'engine / condition'"},
        "--models": {"help": "names of models, with commas between"},
        "--list": {"action": "store_true", "help": "name the rows and their cost, stop"},
        "--budget-s": {
            "type": float,
            "default": float("inf"),
            "help": "start no engine that would not end within so many seconds",
        },
        "--tokenizer": {
            "type": Path,
            "help": "folder of SmolLM2's tokenizer files; by default --smollm2",
        },
        "--smollm2": {
            "type": Path,
            "help": "folder of SmolLM2; by default, without --tokenizer, the embedded model",
        },
        "--merge": {"action": "store_true", "help": "keep the file's other rows"},
        "--out": {"type": Path, "help": "default: eval/results/parity-DEVICE.json"},
        "--commit": {"help": "what is tested, where git cannot say"},
        "--keep-logs": {"type": Path, "help": "folder for the engines' logs"},
    }
    for name, settings in options.items():
        parser.add_argument(name, **settings)
    return parser


def _jobs(arguments: argparse.Namespace) -> list[tuple[Scenario, list[Row]]]:
    wanted = re.compile(arguments.only or "", re.IGNORECASE)
    models = set(arguments.models.split(",")) if arguments.models else None
    jobs = []
    for scenario in SCENARIOS:
        if models is not None and scenario.model not in models:
            continue
        rows = [r for r in planned(scenario, arguments.device) if wanted.search(r.key)]
        if rows:
            jobs.append((scenario, rows))
    return jobs


def _all_rows(
    jobs: Sequence[tuple[Scenario, list[Row]]], earlier: dict[str, Row], device: str
) -> list[Row]:
    """The rows to run, and in their places those of an earlier run that are not run again."""
    running = {row.key: row for _, rows in jobs for row in rows}
    if not earlier:
        return list(running.values())
    every = [row for scenario in SCENARIOS for row in planned(scenario, device)]
    return [running.get(row.key) or earlier.get(row.key) or row for row in every]


def _models(arguments: argparse.Namespace, folder: Path) -> Models:
    from .models import Models

    smollm2, tokenizer = arguments.smollm2, arguments.tokenizer or arguments.smollm2
    if tokenizer is None:
        from core_rerank.models import resolve_model

        smollm2 = tokenizer = Path(resolve_model("smollm2-135m-instruct").path_or_id)
    return Models(folder, tokenizer, smollm2)


def _list(jobs: Sequence[tuple[Scenario, list[Row]]], device: str) -> None:
    total = 0.0
    for scenario, rows in jobs:
        seconds = scenario.seconds_on(device)
        total += seconds or 0
        cost = f"{seconds:.0f} s" if seconds is not None else f"not here: {scenario.absent}"
        print(f"{scenario.name} ({scenario.model}, {cost})")
        for row in rows:
            print(f"    {row.condition}")
    print(f"about {total:.0f} s on {device}")


def _keep_logs(folder: Path, target: Path) -> None:
    import shutil

    target.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("engines-*.log"):
        shutil.copy(log, target)
