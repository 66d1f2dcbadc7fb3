"""``core-rerank serve`` in a process of its own, and the processes below it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
