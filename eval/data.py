"""Read a BEIR folder: corpus, queries and relevance judgements, with errors that name the line.

BEIR's own loader reads the same files, but names no line, lets the last of two equal ids win, and
keeps the whole corpus in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from core_rerank.beir import QUERIES, CorpusFile, read_corpus, read_queries
from core_rerank.errors import DataError
from core_rerank.inputs import check_count
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
        file: where the corpus is on disk, if ``corpus`` was left there and is empty.
    """

    name: str
    corpus: dict[str, Document]
    queries: dict[str, str]
    qrels: Qrels
    file: CorpusFile | None = None

    @property
    def documents(self) -> Mapping[str, Document] | CorpusFile:
        """What a retriever indexes: the corpus in memory, or the file it streams from."""
        return self.corpus if self.file is None else self.file

    def first(self, limit: int | None) -> Dataset:
        """The same with the first ``limit`` queries only (None: all)."""
        if limit is None:
            return self
        kept = list(self.queries)[: check_count("limit", limit)]
        return replace(
            self,
            queries={query_id: self.queries[query_id] for query_id in kept},
            qrels={query_id: self.qrels[query_id] for query_id in kept},
        )


def load_beir(
    folder: str | Path,
    split: str = "test",
    *,
    qrels: str | Path | None = None,
    stream: bool = False,
) -> Dataset:
    """Read ``corpus.jsonl``, ``queries.jsonl`` and ``qrels/SPLIT.tsv``. Ids are text everywhere.

    Queries without a judgement in the split are left out. A pair judged twice keeps the last
    judgement, with a warning. Judged documents need not be in the corpus (ArguAna has such).

    Args:
        folder: holds those files.
        split: the name of the file in ``qrels``.
        qrels: another file of judgements instead, in BEIR's or TREC's form (see ``read_qrels``).
        stream: leave the corpus on disk (``Dataset.file``): millions of documents fit no memory.

    Raises:
        DataError: a file is missing, a line is malformed, an id is there twice, or a judged query
            has no text.
    """
    folder = Path(folder)
    path = _split_file(folder, split) if qrels is None else Path(qrels)
    judgements = read_qrels(path)
    corpus = {} if stream else read_corpus(folder)
    texts = read_queries(folder)
    absent = [query_id for query_id in judgements if query_id not in texts]
    if absent:
        raise DataError(
            f"query {absent[0]!r} is judged in {path} but is not in {folder / QUERIES} "
            f"({len(absent)} such): add its text there, or give the judgements of these queries."
        )
    name = f"{folder.resolve().name}/{split if qrels is None else path.name}"
    queries = {query_id: texts[query_id] for query_id in judgements}
    return Dataset(name, corpus, queries, judgements, CorpusFile(folder) if stream else None)


def read_qrels(path: str | Path) -> Qrels:
    """Judgements from a file: BEIR's three cells with tabs between, or TREC's four.

    A line is ``query-id``, ``corpus-id``, ``score``, after a header if there is one; or ``query``,
    anything, ``document``, ``relevance`` with blanks or tabs between.

    Raises:
        DataError: the file is missing or holds no judgement, or a line is malformed.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"{path} is missing: expected relevance judgements. Give a file in BEIR's form "
            "(query-id, corpus-id, score) or TREC's (query, 0, document, relevance)."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error}): save the file in UTF-8.") from None
    qrels: Qrels = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or (number == 1 and line.rstrip().endswith("score")):
            continue
        query_id, doc_id, score = _judgement(f"{path}, line {number}", line)
        judged = qrels.setdefault(query_id, {})
        if doc_id in judged:
            warnings.warn(
                f"{path}, line {number}: query {query_id!r} and document {doc_id!r} were "
                "judged before; the last judgement counts.",
                stacklevel=3,
            )
        judged[doc_id] = score
    if not qrels:
        raise DataError(
            f"{path} holds no judgements: expected lines of query-id, corpus-id and score with "
            "tabs between after a header, or TREC's query, 0, document and relevance."
        )
    return qrels


def _judgement(where: str, line: str) -> tuple[str, str, int]:
    cells = line.rstrip("\r\n").split("\t")
    if len(cells) != 3 and len(line.split()) == 4:
        query_id, _, doc_id, score = line.split()
        cells = [query_id, doc_id, score]
    if len(cells) != 3 or not cells[2].strip().removeprefix("-").isdecimal():
        raise DataError(
            f"{where}: expected query-id, corpus-id and a whole number with tabs between, or "
            f"TREC's query, 0, document and relevance, not {line.strip():.80}"
        )
    return cells[0], cells[1], int(cells[2])


def _split_file(folder: Path, split: str) -> Path:
    path = folder / "qrels" / f"{split}.tsv"
    if not path.is_file():
        there = sorted(p.stem for p in (folder / "qrels").glob("*.tsv"))
        raise DataError(
            f"{path} is missing. Splits there are: {', '.join(there)}."
            if there
            else f"{path} is missing: expected a BEIR folder. Put the judgements there, or give "
            "their file as qrels."
        )
    return path
