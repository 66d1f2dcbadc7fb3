"""Queries with known answers, read from a BEIR folder: what head detection learns from."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .beir import CORPUS, QUERIES, find_rows, read_corpus, read_queries, read_rows, text_of
from .errors import DataError
from .types import Document

logger = logging.getLogger(__name__)

CANDIDATES = "candidates.jsonl"


@dataclass(frozen=True, slots=True)
class LabelledQuery:
    """A query, the documents that answer it, and hard negatives: near misses that do not."""

    query_id: str
    query: str
    positives: tuple[Document, ...]
    negatives: tuple[Document, ...]


def load_labelled_queries(
    folder: str | Path, limit: int | None = None, negatives: int | None = None
) -> list[LabelledQuery]:
    """Read a BEIR folder: ``corpus.jsonl``, ``queries.jsonl`` and ``candidates.jsonl``.

    A row of ``candidates.jsonl`` is ``{"query-id": ..., "positives": [ids], "negatives": [ids]}``;
    its order is kept. ``limit`` takes the first rows, ``negatives`` the first so many of each.
    Each of the files may be .jsonl.gz or .parquet instead.

    Raises:
        DataError: a file is missing or a line is malformed; a query or document named there does
            not exist, is there twice or is blank; a query has no positives or no negatives; a
            document is both.
    """
    folder = Path(folder)
    found = {name: find_rows(folder, name) for name in (CORPUS, QUERIES, CANDIDATES)}
    missing = [name for name, path in found.items() if path is None]
    candidates = found[CANDIDATES]
    if missing or candidates is None:
        raise DataError(
            f"{folder} lacks {', '.join(missing)}: head detection needs a BEIR folder with "
            f"{CORPUS}, {QUERIES} and {CANDIDATES}, rows of "
            '{"query-id", "positives", "negatives"}, or qrels, from which '
            "`detect-heads --split` finds hard negatives."
        )
    for name, value in (("limit", limit), ("negatives", negatives)):
        if value is not None and (isinstance(value, bool) or value < 1):
            raise DataError(f"{name} must be at least 1, not {value!r}.")
    rows = []
    for where, row in read_rows(candidates):
        query_id, good, bad = _candidates(where, row)
        rows.append((where, (query_id, good, bad[:negatives])))
        if limit is not None and len(rows) == limit:
            break
    if not rows:
        raise DataError(f"{candidates} is empty: no labelled queries.")
    wanted = {doc_id for _, (_, pos, neg) in rows for doc_id in (*pos, *neg)}
    documents = read_corpus(folder, wanted)
    texts = read_queries(folder)
    return [_labelled(where, row, texts, documents) for where, row in rows]


def mine_labelled_queries(
    corpus: Mapping[str, Document],
    queries: Mapping[str, str],
    qrels: Mapping[str, Mapping[str, int]],
    run: Mapping[str, Mapping[str, float]],
    negatives: int,
) -> list[LabelledQuery]:
    """Labelled queries from judgements and a first stage's mistakes.

    Positives are the documents judged above 0. Hard negatives are the first ``negatives`` of the
    query's ``run``, best first, that are not positives and do not say the same as one. A query for
    which the first stage found none is left out, with a warning, and so is one without positives.
    What is not judged counts as a negative, so some may be relevant after all.

    Raises:
        DataError: a positive is not in the corpus or blank, or no query is left.
    """
    labelled: list[LabelledQuery] = []
    skipped: list[str] = []
    for query_id, judged in qrels.items():
        good = [doc_id for doc_id, relevance in judged.items() if relevance > 0]
        for doc_id in good:
            if doc_id not in corpus or not corpus[doc_id].full_text.strip():
                raise DataError(
                    f"document {doc_id!r}, judged relevant to query {query_id!r}, is not in the "
                    "corpus or has no text: complete the corpus, or take it out of the qrels."
                )
        texts = {corpus[doc_id].full_text for doc_id in good}
        ranking = sorted(run.get(query_id, {}).items(), key=lambda item: -item[1])
        found = (corpus[doc_id] for doc_id, _ in ranking if doc_id not in good)
        bad = [d for d in found if d.full_text not in texts and d.full_text.strip()][:negatives]
        if not good or not bad or not queries[query_id].strip():
            skipped.append(query_id)
            continue
        positives = tuple(corpus[doc_id] for doc_id in good)
        labelled.append(LabelledQuery(query_id, queries[query_id], positives, tuple(bad)))
    if not labelled:
        raise DataError(
            f"none of {len(qrels)} queries has both a positive and a hard negative: the first "
            "stage found nothing beside the relevant documents. Give candidates.jsonl instead."
        )
    if skipped:
        logger.warning(
            "left out %d of %d queries, without positives or hard negatives: %s",
            len(skipped),
            len(qrels),
            ", ".join(skipped[:5]) + (" ..." if len(skipped) > 5 else ""),
        )
    return labelled


def _labelled(
    where: str,
    row: tuple[str, list[str], list[str]],
    texts: Mapping[str, str],
    documents: Mapping[str, Document],
) -> LabelledQuery:
    query_id, positives, negatives = row
    if not texts.get(query_id, "").strip():
        raise DataError(f"{where}: query {query_id!r} has no text in {QUERIES}.")
    for kind, ids in (("positive", positives), ("negative", negatives)):
        absent = [doc_id for doc_id in ids if doc_id not in documents]
        if absent:
            raise DataError(
                f"{where}: {kind} {absent[0]!r} of query {query_id!r} is not in {CORPUS}."
            )
        blank = [doc_id for doc_id in ids if not documents[doc_id].full_text.strip()]
        if blank:
            raise DataError(
                f"{where}: {kind} {blank[0]!r} of query {query_id!r} has no text in {CORPUS}."
            )
    return LabelledQuery(
        query_id,
        texts[query_id],
        tuple(documents[i] for i in positives),
        tuple(documents[i] for i in negatives),
    )


def _candidates(where: str, row: Mapping[str, Any]) -> tuple[str, list[str], list[str]]:
    query_id = text_of(where, row, "query-id")
    lists = []
    for key in ("positives", "negatives"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(isinstance(i, str) for i in ids):
            raise DataError(f"{where}: {key!r} must be a list of document ids.")
        if not ids:
            raise DataError(
                f"{where}: query {query_id!r} has no {key}. A contrastive score needs at least "
                "one document that answers the query and one hard negative that does not."
            )
        lists.append(list(dict.fromkeys(ids)))
    both = set(lists[0]) & set(lists[1])
    if both:
        raise DataError(f"{where}: {min(both)!r} is both a positive and a negative.")
    return query_id, lists[0], lists[1]
