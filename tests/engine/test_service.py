"""``core-rerank serve`` on a real vLLM engine: answers, and an engine that is killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from services import DOCUMENTS, QUERY

pytestmark = pytest.mark.engine

BODY = {"query": QUERY, "documents": DOCUMENTS, "raw_scores": True, "return_documents": False}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """The command in a process of its own: (process, url, what it says on stderr)."""
    command = [sys.executable, "-m", "core_rerank.cli", "serve", "--port", "0", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if line.startswith("Serving"):
                ready.set()
        ready.set()

    reader = threading.Thread(target=listen)
    reader.start()
    try:
        assert ready.wait(300)
        found = re.search(r"http://\S+", "".join(said))
        assert found, said
        yield process, found[0], said
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        reader.join(10)


def child_processes(parent: int) -> dict[int, int]:
    """Process ids below ``parent``, and the memory pages that each has."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == parent:
                found[int(folder.name)] = int((folder / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found


def runs(pid: int) -> bool:
    """Whether the process is there, and is not just a zombie that nobody has waited for."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def check_answers(url: str) -> None:
    """Requests at the same time get what each gets alone."""

    def ask(query: str) -> list[tuple[int, float]]:
        answer = httpx.post(f"{url}/v1/rerank", json={**BODY, "query": query}, timeout=60)
        return [(r["index"], r["relevance_score"]) for r in answer.json()["results"]]

    assert {index for index, _ in ask(QUERY)[:2]} == {1, 3}
    queries = [QUERY, "How is bread made?", "Where is the cat?"] * 8
    alone = {query: ask(query) for query in queries[:3]}
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(ask, queries))
    for query, results in zip(queries, together, strict=True):
        assert [i for i, _ in results] == [i for i, _ in alone[query]]
        assert [s for _, s in results] == pytest.approx([s for _, s in alone[query]], abs=1e-4)


def test_it_answers_many_at_once_and_says_when_its_engine_is_killed() -> None:
    with served("--max-model-len", "1024") as (process, url, said):
        check_answers(url)
        children = child_processes(process.pid)
        engine = max(children, key=lambda pid: children[pid])

        def ask(number: int) -> httpx.Response | httpx.HTTPError:
            texts = [f"{text} {number} {i}" for text in DOCUMENTS for i in range(20)]
            try:
                return httpx.post(f"{url}/rerank", json={"query": "q", "texts": texts}, timeout=60)
            except httpx.HTTPError as error:
                return error

        with ThreadPoolExecutor(6) as pool:
            asked = [pool.submit(ask, number) for number in range(6)]
            time.sleep(0.5)
            os.kill(engine, signal.SIGKILL)
            answers = [future.result() for future in asked]
        assert process.wait(60) == 3
    statuses = [a.status_code for a in answers if isinstance(a, httpx.Response)]
    assert set(statuses) <= {200, 503}
    assert 503 in statuses
    assert "Stopped: the engine is gone.\n" in said
    left = set(children)
    for _ in range(100):  # the resource tracker of multiprocessing ends a moment later
        left = {pid for pid in left if runs(pid)}
        if not left:
            break
        time.sleep(0.1)
    assert not left
