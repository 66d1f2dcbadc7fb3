"""A first stage that somebody else ran: rankings read from a TREC run or a table of ranks."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from core_rerank.errors import DataError, IndexFolderError
from core_rerank.inputs import check_count

from .base import Run, versions
from .corpus import Corpus, CorpusPass, Fingerprint
from .index_folder import Manifest, file_hash, read_index, read_manifest, write_index

_COPY = "run.trec"


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    query_id: str
    doc_id: str
    rank: int
    score: float


def read_run(path: str | Path) -> Run:
    """Read a run: query id -> document id -> score, best first.

    A line is one of these, and a file may start with a header that begins with ``query-id``:

    - ``query Q0 document rank score tag`` (TREC), blanks or tabs between; the document's id may
      hold blanks, the query's may not;
    - ``query``, ``document``, ``rank``, ``score`` with tabs between;
    - ``query``, ``document``, ``rank`` with tabs between (MS MARCO); the score is 1 / rank.

    Documents are ordered by score, the highest first; equal scores by the rank column, then by
    line. (trec_eval looks at no ranks: it orders equal scores by id, backwards.)

    Raises:
        DataError: the file is missing or empty, a line is malformed, or a query names a document
            twice; names the lines.
    """
    return {
        query_id: {line.doc_id: line.score for line in lines}
        for query_id, lines in _read(Path(path)).items()
    }


def run_lines(run: Run, tag: str) -> Iterator[str]:
    """The run as TREC lines, in its order: query, Q0, document, rank from 1, score, tag."""
    for query_id, scores in run.items():
        for rank, (doc_id, score) in enumerate(scores.items(), start=1):
            yield f"{query_id} Q0 {doc_id} {rank} {score:.8g} {tag}"


class RunFileRetriever:
    """Gives back a run file's rankings (``read_run``) by query id; queries' texts are not read.

    ``index`` is optional: it checks that the corpus has every document of the run.
    """

    def __init__(self, path: str | Path) -> None:
        """Reads the file. Raises DataError as ``read_run`` does."""
        self.path = Path(path)
        self._lines = _read(self.path)
        self._sha256 = file_hash(self.path)
        self._corpus: Fingerprint | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The file's hash."""
        return {"sha256": self._sha256}

    def index(self, corpus: Corpus, *, progress: bool = False) -> None:
        """Check that every document of the run is in the corpus.

        Raises:
            DataError: one is not; names its line.
        """
        reading = CorpusPass(corpus, "run file: checking", progress=progress)
        there = {doc_id for doc_id, _ in reading}
        for lines in self._lines.values():
            for line in lines:
                if line.doc_id not in there:
                    raise DataError(
                        f"{self.path}, line {line.number}: document {line.doc_id!r} is not in the "
                        f"corpus of {len(there)} documents. Is this a run over another corpus?"
                    )
        self._corpus = reading.fingerprint()

    def search(self, queries: Mapping[str, str], depth: int, *, progress: bool = False) -> Run:
        """At most ``depth`` documents for each query id, best first; every query is in the run.

        A query that the file lacks gets an empty result. ``progress`` has nothing to show.

        Raises:
            DataError: the file has none of these queries.
        """
        depth = check_count("depth", depth)
        if queries and not any(query_id in self._lines for query_id in queries):
            raise DataError(
                f"{self.path} has none of the {len(queries)} queries: it holds "
                f"{next(iter(self._lines))!r} and {len(self._lines) - 1} others, "
                f"{next(iter(queries))!r} was asked for. Is this a run of other queries?"
            )
        return {
            query_id: {line.doc_id: line.score for line in self._lines.get(query_id, [])[:depth]}
            for query_id in queries
        }

    def save(self, folder: str | Path) -> None:
        """Write a copy of the run and the corpus's fingerprint, whole or not at all.

        Raises:
            IndexFolderError: something that is not an index is there, or the file has changed.
            RuntimeError: no corpus was indexed.
        """
        if self._corpus is None:
            raise RuntimeError("RunFileRetriever.save was called before index(corpus).")
        write_index(folder, Manifest("run", self.settings, self._corpus, versions()), self._write)

    def restore(self, folder: str | Path, corpus: Corpus | None = None) -> None:
        """Take over what ``save`` wrote, in place of ``index``.

        Raises:
            IndexFolderError: it is damaged, of another run, or of another corpus than ``corpus``.
        """
        self._corpus = read_index(folder, "run", self.settings, corpus).corpus

    @classmethod
    def load(cls, folder: str | Path, corpus: Corpus | None = None) -> Self:
        """A run that ``save`` wrote. Raises IndexFolderError as ``restore`` does."""
        read_manifest(folder, "run")
        path = Path(folder) / _COPY
        if not path.is_file():
            raise IndexFolderError(f"{path} is missing: the index is damaged. Save it again.")
        retriever = cls(path)
        retriever.restore(folder, corpus)
        return retriever

    def _write(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / _COPY)
        if file_hash(folder / _COPY) != self._sha256:
            raise IndexFolderError(f"{self.path} has changed since it was read. Read it again.")


def _read(path: Path) -> dict[str, list[_Line]]:
    """Lines by query, best first."""
    rankings: dict[str, dict[str, _Line]] = {}
    for line in _parsed(path):
        ranking = rankings.setdefault(line.query_id, {})
        first = ranking.setdefault(line.doc_id, line)
        if first is not line:
            raise DataError(
                f"{path}, line {line.number}: query {line.query_id!r} has document "
                f"{line.doc_id!r} twice, first on line {first.number}: take one of them out."
            )
    if not rankings:
        raise DataError(
            f"{path} holds no ranking: expected lines of 'query Q0 document rank score tag'. Run "
            "the first stage again, or give another file."
        )
    return {
        query_id: sorted(ranking.values(), key=lambda line: (-line.score, line.rank, line.number))
        for query_id, ranking in rankings.items()
    }


def _parsed(path: Path) -> Iterator[_Line]:
    if not path.is_file():
        raise DataError(
            f"{path} is missing: expected a TREC run. Give the path of a file with lines of "
            "'query Q0 document rank score tag'."
        )
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError:
                raise DataError(f"{where} is not UTF-8: save the file in UTF-8.") from None
            if text.strip() and not (number == 1 and text.startswith("query-id")):
                yield _line(where, number, text)


def _line(where: str, number: int, text: str) -> _Line:
    query_id, doc_id, rank_text, score_text = _cells(where, text)
    if not rank_text.isdecimal():
        raise DataError(f"{where}: the rank must be a whole number, but is {rank_text!r:.60}.")
    rank = int(rank_text)
    if score_text is None:
        if rank == 0:
            raise DataError(f"{where}: ranks without scores must start at 1, but this is 0.")
        return _Line(number, query_id, doc_id, rank, 1.0 / rank)
    try:
        score = float(score_text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise DataError(f"{where}: the score must be a finite number, but is {score_text!r:.60}.")
    return _Line(number, query_id, doc_id, rank, score)


def _cells(where: str, text: str) -> tuple[str, str, str, str | None]:
    """Query id, document id, rank and, if there is one, score."""
    tabbed = [cell.strip() for cell in text.split("\t")]
    if len(tabbed) in (3, 4) and all(tabbed):
        query_id, doc_id, rank, *score = tabbed
        return query_id, doc_id, rank, score[0] if score else None
    # From both ends, since the document's id may hold blanks.
    start = text.split(maxsplit=2)
    end = start[2].rsplit(maxsplit=3) if len(start) == 3 else []
    if len(end) != 4:
        raise DataError(
            f"{where}: expected 'query Q0 document rank score tag', or query, document, rank and "
            f"perhaps score with tabs between, not {text.strip()!r:.80}."
        )
    return start[0], end[0], end[1], end[2]
