"""A tiny BEIR folder, and rankers without a model, for tests of evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from core_rerank.eval.data import Dataset
from core_rerank.eval.rivals.base import RankerResult, Task, by_score
from core_rerank.eval.systems import RankerSystem
from core_rerank.types import Document

TOPICS = {
    "tides": ("Ocean tides follow the gravity of the moon.", "What causes ocean tides?"),
    "bread": ("Sourdough bread rises with wild yeast.", "What makes sourdough bread rise?"),
    "violin": ("The violin has four strings tuned in fifths.", "How is a violin tuned?"),
    "copper": ("Copper conducts electricity better than iron.", "Does copper conduct?"),
    "glacier": ("A glacier is ice that flows slowly downhill.", "What is a glacier?"),
    "enzyme": ("An enzyme speeds up a reaction in a cell.", "What does an enzyme speed up?"),
}
CORPUS = {name: Document(text, name) for name, (text, _) in TOPICS.items()}
QUERIES = {f"q-{name}": question for name, (_, question) in TOPICS.items()}
QRELS = {f"q-{name}": {name: 1} for name in TOPICS}
DATA = Dataset("tiny/test", CORPUS, QUERIES, QRELS)


def beir_folder(root: Path) -> Path:
    """The collection above on disk: 6 queries, 6 documents."""
    folder = root / "tiny"
    (folder / "qrels").mkdir(parents=True)
    corpus = [{"_id": d.doc_id, "title": "", "text": d.text} for d in CORPUS.values()]
    queries = [{"_id": query_id, "text": text} for query_id, text in QUERIES.items()]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    judged = "".join(f"{q}\t{d}\t1\n" for q, row in QRELS.items() for d in row)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    return folder


def run_file(root: Path, depth: int = 5) -> Path:
    """A first stage that finds every query's document, second."""
    lines = []
    for query_id in QUERIES:
        right = query_id.removeprefix("q-")
        others = [name for name in TOPICS if name != right]
        found = [others[0], right, *others[1:]][:depth]
        lines += [f"{query_id} Q0 {d} {i} {10 - i} t\n" for i, d in enumerate(found, start=1)]
    path = root / "first.trec"
    path.write_text("".join(lines))
    return path


class WordRanker:
    """Scores a document by the words that it shares with the query; remembers its batches."""

    name = "words"

    def __init__(self, score: Callable[[str, str], float] | None = None) -> None:
        self.batches: list[list[str]] = []
        self._score = score or shared_words

    def rank(self, query: str, documents: Sequence[str]) -> RankerResult:
        return self.rank_batch([(query, documents)])[0]

    def rank_batch(self, tasks: Sequence[Task]) -> list[RankerResult]:
        self.batches.append([query for query, _ in tasks])
        results = []
        for query, texts in tasks:
            scores = tuple(self._score(query, text) for text in texts)
            results.append(RankerResult(by_score(scores), scores, 0.5, 10, 2))
        return results


def shared_words(query: str, text: str) -> float:
    """How many words of the query the text has."""
    return float(len(_words(query) & _words(text)))


def words_system(
    ranker: WordRanker | None = None, name: str = "words", pointwise: bool = True
) -> RankerSystem:
    """A system that needs no model."""
    made = ranker or WordRanker()
    return RankerSystem(name, lambda: made, {"version": 1}, pointwise)


def _words(text: str) -> set[str]:
    return {word.strip(".?").lower() for word in text.split()}
