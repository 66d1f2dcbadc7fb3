"""Load and soak of ``core-rerank serve``: latencies in an open loop, and what many requests leave.

    python -m core_rerank.eval.service_load load --rates 1,2,4 -- --backend transformers
    python -m core_rerank.eval.service_load soak --requests 20000

What follows ``--`` goes to ``core-rerank serve``, which this starts. Both print a table and write a
JSON file. In the open loop requests come at random times (a Poisson process) whether or not the
earlier ones are answered, and a latency counts from the time a request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_report import environment
from .files import write_whole
from .resident import resident_mib

if TYPE_CHECKING:
    import httpx

BODIES = 50
CANCELLED = 0.05
AT_ONCE = 32
TOLERANCE = 1e-4
"""Of a score against the same request's alone, relative to the largest of its ranking."""
WORDS = [
    "moon",
    "tide",
    "ocean",
    "bread",
    "yeast",
    "river",
    "stone",
    "cloud",
    "engine",
    "paper",
    "winter",
    "signal",
    "garden",
    "copper",
    "letter",
]


@dataclass(frozen=True, slots=True)
class LoadRow:
    """One rate: requests a second sent, those answered in time a second, latencies in seconds."""

    rate: float
    sent: int
    goodput: float
    p50_s: float
    p95_s: float
    p99_s: float
    statuses: dict[str, int]


@dataclass(frozen=True, slots=True)
class SoakResult:
    """What became of all requests, and the server's resident MiB at each tenth."""

    requests: int
    equal: int
    different: int
    cancelled: int
    refused: int
    lost: int
    seconds: float
    resident_mib: list[float]
    left_running: float
    left_waiting: float


def make_body(number: int, documents: int, words: int) -> dict[str, Any]:
    """Deterministic; documents are shared by some of the bodies, so that caches are hit."""
    chance = random.Random(number)
    texts = [
        " ".join(random.Random(number // 2 * 1000 + i).choices(WORDS, k=words))
        for i in range(documents)
    ]
    query = " ".join(chance.choices(WORDS, k=5))
    return {"query": query, "documents": texts, "raw_scores": True, "return_documents": False}


@contextmanager
def served(options: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A service of its own: (address, process id). RuntimeError if it does not start."""
    command = [sys.executable, "-m", "core_rerank.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        while not (found := re.search(r"^Serving .* on (\S+)$", said, re.MULTILINE)):
            line = process.stderr.readline()
            if not line:
                raise RuntimeError(f"the service did not start:\n{said}")
            said += line
        yield found[1], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()


async def load(
    url: str, rates: Sequence[float], seconds: float, within_s: float, documents: int, words: int
) -> list[LoadRow]:
    """Each rate for so many seconds; an answer counts as good within ``within_s``."""
    import httpx

    rows = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for rate in rates:
            rows.append(await _one_rate(client, rate, seconds, within_s, documents, words))
    return rows


async def _one_rate(
    client: httpx.AsyncClient,
    rate: float,
    seconds: float,
    within_s: float,
    documents: int,
    words: int,
) -> LoadRow:
    chance = random.Random(int(rate * 1000))
    started = time.perf_counter()
    due, tasks = 0.0, []

    async def one(number: int, due: float) -> tuple[str, float]:
        body = make_body(number, documents, words)
        response = await client.post("/v1/rerank", json=body)
        return str(response.status_code), time.perf_counter() - started - due

    while (due := due + chance.expovariate(rate)) < seconds:
        await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(chance.randrange(10**6), due)))
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    done = [answer for answer in answers if not isinstance(answer, BaseException)]
    statuses = Counter(status for status, _ in done)
    statuses.update(
        type(answer).__name__ for answer in answers if isinstance(answer, BaseException)
    )
    good = sorted(latency for status, latency in done if status == "200")
    in_time = sum(latency <= within_s for latency in good)
    p50, p95, p99 = (_quantile(good, q) for q in (0.5, 0.95, 0.99))
    return LoadRow(rate, len(answers), in_time / seconds, p50, p95, p99, dict(statuses))


def _quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; 0 of none."""
    if not ascending:
        return 0.0
    return ascending[max(0, -int(-share * len(ascending) // 1) - 1)]


async def soak(url: str, pid: int, requests: int, bar: Any = None) -> SoakResult:
    """``requests`` small requests, `AT_ONCE` at a time, `CANCELLED` of them given up early.

    ``bar`` is a tqdm or nothing. Each answer is compared with the same request's alone.
    """
    import httpx

    bodies = [make_body(number, 2, 8) for number in range(BODIES)]
    counts: Counter[str] = Counter()
    numbers = iter(range(requests))
    memory = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        alone = [(await client.post("/v1/rerank", json=body)).json() for body in bodies]
        started = time.perf_counter()

        async def one(number: int) -> str:
            chance = random.Random(number)
            place = chance.randrange(BODIES)
            give_up = chance.uniform(0, 0.05) if chance.random() < CANCELLED else None
            try:
                async with asyncio.timeout(give_up):
                    response = await client.post("/v1/rerank", json=bodies[place])
            except TimeoutError:
                return "cancelled"
            except httpx.HTTPError:
                return "lost"
            if response.status_code in (429, 503):
                return "refused"
            return "equal" if _same(response.json(), alone[place]) else "different"

        async def worker() -> None:
            for number in numbers:
                counts[await one(number)] += 1
                if number % max(1, requests // 10) == 0:
                    memory.append(round(resident_mib(pid), 1))
                if bar is not None:
                    bar.update(1)

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        took = time.perf_counter() - started
        await asyncio.sleep(1)
        metrics = (await client.get("/metrics")).text
    return SoakResult(
        requests,
        counts["equal"],
        counts["different"],
        counts["cancelled"],
        counts["refused"],
        counts["lost"],
        round(took, 1),
        memory,
        _gauge(metrics, "running_requests"),
        _gauge(metrics, "waiting_requests"),
    )


def _same(answer: Any, alone: Any) -> bool:
    if "results" not in answer:
        return False
    got = {item["index"]: item["relevance_score"] for item in answer["results"]}
    want = {item["index"]: item["relevance_score"] for item in alone["results"]}
    scale = max(map(abs, want.values())) or 1.0
    return got.keys() == want.keys() and all(
        abs(got[index] - want[index]) <= TOLERANCE * scale for index in want
    )


def _gauge(metrics: str, name: str) -> float:
    found = re.search(rf"^core_rerank_{name} (\S+)$", metrics, re.MULTILINE)
    if found is None:
        raise ValueError(f"/metrics has no core_rerank_{name}.")
    return float(found[1])


def load_table(rows: Sequence[LoadRow], within_s: float) -> str:
    """Markdown."""
    lines = [
        f"| sent/s | answered within {within_s:g} s, /s | p50 | p95 | p99 | statuses |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        statuses = ", ".join(f"{name}: {count}" for name, count in sorted(row.statuses.items()))
        times = " | ".join(f"{value:.2f} s" for value in (row.p50_s, row.p95_s, row.p99_s))
        lines.append(f"| {row.rate:g} | {row.goodput:.2f} | {times} | {statuses} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one; 1 where a soak lost something, or an answer differed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stops the service
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    with served(given[cut + 1 :]) as (url, pid):
        if options.what == "load":
            rates = [float(rate) for rate in options.rates.split(",")]
            sizes = (options.documents, options.words)
            rows = asyncio.run(load(url, rates, options.seconds, options.within, *sizes))
            print(load_table(rows, options.within))
            result: dict[str, Any] = {"load": [asdict(row) for row in rows]}
            failed = False
        else:
            from tqdm import tqdm

            with tqdm(total=options.requests, unit="request") as bar:
                soaked = asyncio.run(soak(url, pid, options.requests, bar))
            result = {"soak": asdict(soaked)}
            print(json.dumps(result["soak"], indent=1))
            failed = bool(
                soaked.different or soaked.lost or soaked.left_running or soaked.left_waiting
            )
    asked = {"serve": given[cut + 1 :], **vars(options), "output": str(options.output)}
    text = json.dumps({"asked": asked, "environment": environment(), **result}, indent=1)
    write_whole(options.output, text + "\n")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    loads = kinds.add_parser("load", help="latencies at given rates")
    loads.add_argument("--rates", default="1,2,4", help="requests a second, with commas")
    loads.add_argument("--seconds", type=float, default=30, help="for each rate")
    loads.add_argument("--within", type=float, default=5, help="seconds that are in time")
    loads.add_argument("--documents", type=int, default=5, help="of a request")
    loads.add_argument("--words", type=int, default=60, help="of a document")
    soaks = kinds.add_parser("soak", help="many small requests, some given up")
    soaks.add_argument("--requests", type=int, default=20_000)
    for kind, name in ((loads, "load"), (soaks, "soak")):
        kind.add_argument("--output", type=Path, default=Path(f"service-{name}.json"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
