"""A corpus of 1,000,000 lines: what stays in memory is ids and terms, never the texts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LINES = 1_000_000
#: Characters of a text that are no words: 300 MB in all, far above what may stay in memory.
FILLER = "." * 300
MEASURE = """
import resource, sys
from core_rerank.beir import CorpusFile
from core_rerank.retrievers import BM25Retriever
from core_rerank.retrievers.corpus import fingerprint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

corpus = CorpusFile(sys.argv[1])
import bm25s, Stemmer, numpy, tqdm
start = peak()
assert fingerprint(corpus).documents == int(sys.argv[2])
read = peak()
retriever = BM25Retriever(language="none")
retriever.index(corpus)
run = retriever.search({"q": "w123"}, 3)
assert len(run["q"]) == 3, run
print(read - start, peak() - start)
"""


@pytest.mark.slow
def test_a_million_lines_are_indexed_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    with path.open("w", encoding="ascii") as file:
        for number in range(LINES):
            words = " ".join(f"w{number * step % 9973}" for step in (1, 3, 7, 11, 13, 17))
            file.write(f'{{"_id": "d{number}", "text": "{words}{FILLER}"}}\n')
    assert path.stat().st_size > 300e6
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), str(LINES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    reading, indexing = map(int, result.stdout.split())
    print(f"reading took {reading} MiB, reading and indexing {indexing} MiB")
    assert reading < 200
    assert indexing < 700
