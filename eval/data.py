"""Read a BEIR folder: corpus, queries and relevance judgements, with errors that name the line."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from core_rerank.beir import QUERIES, read_corpus, read_queries
from core_rerank.errors import DataError
from core_rerank.types import Document

Qrels = dict[str, dict[str, int]]
"""Query id -> document id -> relevance; 0 is judged and not relevant."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """One split of a BEIR folder.

    Attributes:
        name: the folder's name and the split, such as ``"scifact/test"``.
        corpus: documents by id, in file order.
        queries: the judged queries' texts by id, in the order of the judgements.
        qrels: relevance by query id and document id.
    """

    name: str
    corpus: dict[str, Document]
    queries: dict[str, str]
    qrels: Qrels

    def first(self, limit: int | None) -> Dataset:
        """The same with the first ``limit`` queries only (None: all)."""
        if limit is None:
            return self
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise ValueError(f"limit must be a whole number of at least 1, not {limit!r}.")
        kept = list(self.queries)[:limit]
        return Dataset(
            self.name,
            self.corpus,
            {query_id: self.queries[query_id] for query_id in kept},
            {query_id: self.qrels[query_id] for query_id in kept},
        )


def load_beir(folder: str | Path, split: str = "test") -> Dataset:
    """Read ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``. Ids are text everywhere.

    Queries without a judgement in the split are left out. A pair judged twice keeps the last
    judgement, with a warning. Judged documents need not be in the corpus (ArguAna has such).

    Raises:
        DataError: a file is missing, a line is malformed, an id is there twice, or a judged query
            has no text.
    """
    folder = Path(folder)
    qrels = _read_qrels(folder, split)
    corpus = read_corpus(folder)
    texts = read_queries(folder)
    absent = [query_id for query_id in qrels if query_id not in texts]
    if absent:
        raise DataError(
            f"query {absent[0]!r} is judged in qrels/{split}.tsv but is not in {folder / QUERIES}."
        )
    name = f"{folder.resolve().name}/{split}"
    return Dataset(name, corpus, {query_id: texts[query_id] for query_id in qrels}, qrels)


def _read_qrels(folder: Path, split: str) -> Qrels:
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = sorted(p.stem for p in (folder / "qrels").glob("*.tsv"))
        raise DataError(
            f"{path} is missing. "
            + (f"Splits there are: {', '.join(there)}." if there else "Expected a BEIR folder.")
        )
    qrels: Qrels = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            cells = line.rstrip("\r\n").split("\t")
            if not line.strip() or (number == 1 and cells[-1] == "score"):
                continue
            if len(cells) != 3 or not cells[2].strip().lstrip("-").isdecimal():
                raise DataError(
                    f"{path}, line {number}: expected query-id, corpus-id and a whole number "
                    f"with tabs between, not {line.strip():.80}"
                )
            query_id, doc_id, score = cells
            judged = qrels.setdefault(query_id, {})
            if doc_id in judged:
                warnings.warn(
                    f"{path}, line {number}: query {query_id!r} and document {doc_id!r} were "
                    "judged before; the last judgement counts.",
                    stacklevel=3,
                )
            judged[doc_id] = int(score)
    if not qrels:
        raise DataError(f"{path} holds no judgements.")
    return qrels
