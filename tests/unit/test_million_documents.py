"""Corpora larger than what may stay in memory: ids and terms do, the texts never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MEASURE = """
import sys
from core_rerank.beir import CorpusFile
from core_rerank.retrievers import BM25Retriever
import bm25s, Stemmer, numpy, tqdm

def peak():
    with open("/proc/self/status") as lines:  # getrusage counts the parent before exec too
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

corpus = CorpusFile(sys.argv[1])
start = peak()
{work}
print(peak() - start)
"""
STREAM = "assert sum(1 for _ in corpus) == int(sys.argv[2])"
INDEX = """
retriever = BM25Retriever(language="none")
retriever.index(corpus)
run = retriever.search({"q": "w123"}, 3)
assert len(run["q"]) == 3, run
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "lines", "filler", "mebibytes"),
    [
        pytest.param(STREAM, 1_000_000, 300, 200, id="read"),
        pytest.param(INDEX, 50_000, 1200, 40, id="BM25"),
    ],
)
def test_memory_is_bounded(
    tmp_path: Path, work: str, lines: int, filler: int, mebibytes: int
) -> None:
    """Each corpus has at least 1.4 times as much text as may stay in memory."""
    path = tmp_path / "corpus.jsonl"
    dots = "." * filler  # characters that are no words
    with path.open("w", encoding="ascii") as file:
        for number in range(lines):
            words = " ".join(f"w{number * step % 9973}" for step in (1, 3, 7))
            file.write(f'{{"_id": "d{number}", "text": "{words}{dots}"}}\n')
    result = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("{work}", work), str(path), str(lines)],
        capture_output=True,
        text=True,
        check=False,
    )
    path.unlink()
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) < mebibytes
