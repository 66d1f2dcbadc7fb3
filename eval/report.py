"""What an evaluation found, as typed values, and how it is computed from rankings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core_rerank.fusion import Fusion
from core_rerank.types import Document

from .candidates import Candidates, Run
from .data import Dataset
from .measures import MAIN, mean, measure_run, ndcg
from .rivals.base import RankerResult, by_score
from .significance import length_correlation, paired_bootstrap, paired_randomisation

FIRST_STAGE = "first-stage"
DEPTHS = (1, 2, 3, 5, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean nDCG@10 less the first stage's, over the same queries.

    Attributes:
        difference: above 0 where the system is better.
        low, high: 95 % paired bootstrap interval of the difference.
        p: two-sided, of the paired randomisation test that it is 0.
    """

    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, slots=True)
class Cost:
    """What a system's rankings took; a fusion costs what the system it fuses costs.

    ``seconds`` is the time of the batches alone (of the first stage: of searching); starting and
    indexing are not in it.
    """

    seconds: float
    seconds_per_query: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SystemReport:
    """One system's results.

    Attributes:
        name: what files call it too; the first stage is ``first-stage``.
        settings: everything that decides its rankings, as JSON.
        facts: what its engine turned out to be, as JSON.
        run: query id -> document id -> score, best first; failed queries are not in it.
        measures: measure -> query id -> value, of every judged query.
        interval: 95 % bootstrap interval of mean nDCG@10.
        comparison: against the first stage; None for the first stage itself.
        depth_curve: mean nDCG@10 if only the first stage's first so many are reranked.
        depth_curve_exact: False where the documents were scored together with those left out.
        length_correlation: see ``significance.length_correlation``; None without scores.
        failed: query id -> why it has no ranking.
        mended: answers that were no complete ordering.
        cost: time and tokens.
    """

    name: str
    settings: dict[str, Any]
    facts: dict[str, Any]
    run: Run
    measures: dict[str, dict[str, float]]
    interval: tuple[float, float]
    comparison: Comparison | None
    depth_curve: dict[int, float]
    depth_curve_exact: bool
    length_correlation: float | None
    failed: dict[str, str]
    mended: int
    cost: Cost

    @property
    def means(self) -> dict[str, float]:
        """Every measure's mean over the judged queries."""
        return {name: mean(values) for name, values in self.measures.items()}


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation: the first stage, then every system in the order given."""

    dataset: Dataset
    candidates: Candidates
    systems: tuple[SystemReport, ...]
    batch: int
    relevance_level: int
    environment: Mapping[str, Any]

    def __getitem__(self, name: str) -> SystemReport:
        """The system called ``name``; KeyError names those there are."""
        for system in self.systems:
            if system.name == name:
                return system
        raise KeyError(f"no system {name!r}: there are {', '.join(s.name for s in self.systems)}.")


@dataclass(frozen=True, slots=True)
class Rankings:
    """A system's results for each query's candidates, from which runs of any depth are made.

    Attributes:
        candidates: the first stage's run.
        results: by query id; places refer to the candidates.
        fusion: how the results are fused with the first stage; None leaves them alone.
    """

    candidates: Run
    results: Mapping[str, RankerResult]
    fusion: Fusion | None = None
    failed: Mapping[str, str] = field(default_factory=dict)

    def run(self, depth: int | None = None) -> Run:
        """The run, or what it is if the first ``depth`` candidates are all there are.

        Where a ranker gives an order only, a document's score is the number of those below it.
        """
        made: Run = {}
        for query_id, result in self.results.items():
            first = dict(list(self.candidates[query_id].items())[:depth])
            doc_ids, scores = list(first), self._scores(result)[: len(first)]
            order: Sequence[int] = [place for place in result.order if place < len(first)]
            if self.fusion is not None:
                scores = self.fusion.fuse(list(first.values()), scores)
                order = by_score(scores)
            made[query_id] = {doc_ids[place]: scores[place] for place in order}
        return made

    @property
    def have_scores(self) -> bool:
        """Whether scores say more than the order."""
        return all(result.scores is not None for result in self.results.values())

    def _scores(self, result: RankerResult) -> list[float]:
        if result.scores is not None:
            return list(result.scores)
        scores = [0.0] * len(result.order)
        for rank, place in enumerate(result.order, start=1):
            scores[place] = float(len(result.order) - rank)
        return scores


def first_stage_rankings(candidates: Candidates) -> Rankings:
    """The first stage as a system: its candidates as they are."""
    found = {query_id: scores for query_id, scores in candidates.run.items() if scores}
    each = candidates.seconds / max(1, len(candidates.run))
    results = {
        query_id: RankerResult(tuple(range(len(scores))), tuple(scores.values()), each, 0)
        for query_id, scores in found.items()
    }
    return Rankings(candidates.run, results)


def report_system(
    name: str,
    rankings: Rankings,
    dataset: Dataset,
    candidates: Candidates,
    *,
    settings: dict[str, Any],
    facts: dict[str, Any],
    pointwise: bool,
    relevance_level: int = 1,
    first_stage: SystemReport | None = None,
) -> SystemReport:
    """Measure one system; against ``first_stage`` unless this is it."""
    run, qrels = rankings.run(), dataset.qrels
    measures = measure_run(qrels, run, candidates.depth, relevance_level)
    values = list(measures[MAIN].values())
    depths = [depth for depth in DEPTHS if depth < candidates.depth] + [candidates.depth]
    curve = {depth: mean(ndcg(qrels, rankings.run(depth))) for depth in depths}
    lengths = _lengths(run, candidates.documents)
    return SystemReport(
        name,
        settings,
        facts,
        run,
        measures,
        paired_bootstrap(values),
        None if first_stage is None else _compare(values, first_stage),
        curve,
        pointwise,
        length_correlation(lengths) if rankings.have_scores else None,
        dict(rankings.failed),
        sum(result.failures for result in rankings.results.values()),
        _cost(rankings.results),
    )


def _compare(values: Sequence[float], first_stage: SystemReport) -> Comparison:
    before = first_stage.measures[MAIN].values()
    differences = [new - old for new, old in zip(values, before, strict=True)]
    low, high = paired_bootstrap(differences)
    difference = sum(differences) / len(differences)
    return Comparison(difference, low, high, paired_randomisation(differences))


def _lengths(run: Run, documents: Mapping[str, Document]) -> list[tuple[list[float], list[int]]]:
    return [
        (list(scores.values()), [len(documents[doc_id].full_text) for doc_id in scores])
        for scores in run.values()
    ]


def _cost(results: Mapping[str, RankerResult]) -> Cost:
    seconds = sum(result.seconds for result in results.values())
    return Cost(
        seconds,
        seconds / max(1, len(results)),
        sum(result.input_tokens for result in results.values()),
        sum(result.output_tokens for result in results.values()),
    )
