"""The embedded model on every test collection: ``python -m core_rerank.eval.quality_table``.

The collections are folders named as below, in BEIR's form. Each gets a folder of results (see
``docs/evaluation.md``); a stopped run goes on by the same command. Every engine is started once for
all collections.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from core_rerank.beir import read_corpus
from core_rerank.fusion import Fusion
from core_rerank.heads import packaged_files
from core_rerank.rows import read_rows

from .candidates import Candidates, find_candidates
from .data import Dataset, load_beir
from .files import digest, make_folder, write_whole
from .harness import evaluate, rank
from .report import FIRST_STAGE, Report, SystemReport
from .systems import (
    AttentionSystem,
    FusedSystem,
    GenerationSystem,
    System,
    attention_system,
    by_engine,
    engines_for,
    with_random_heads,
    with_strategy,
)

OWN_CANDIDATES = "candidates.jsonl"
CORE_HEADS = "smollm2-135m-instruct.core-pointwise.yaml"
FUSION = Fusion(weight=0.5)
RANDOM_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Collection:
    """A test collection, and what is asked of it.

    Attributes:
        name: its folder's.
        retriever: the first stage, or ``OWN_CANDIDATES``: the folder's own lists, shuffled.
        limit: only so many of its queries; None is all.
        goal: what nDCG@10 ought to gain over the first stage, or reach if ``absolute``.
    """

    name: str
    split: str
    retriever: str = "bm25"
    depth: int = 20
    limit: int | None = None
    goal: float | None = None
    absolute: bool = False

    def load(self, data: Path) -> Dataset:
        """Its judged queries; the corpus stays on disk."""
        return load_beir(data / self.name, self.split, stream=True).first(self.limit)

    def candidates(self, dataset: Dataset, data: Path, keep: Path) -> Candidates:
        """Its first stage's candidates."""
        if self.retriever == OWN_CANDIDATES:
            return own_candidates(data / self.name, dataset)
        kind, colon, name = self.retriever.partition(":")
        retriever = f"run:{data / self.name / name}" if colon else kind
        return find_candidates(dataset, retriever, self.depth, keep=keep, progress=True)


COLLECTIONS = (
    Collection("scifact", "test", goal=0.04),
    Collection("trec-dl19", "test_full", "run:bm25_top100.tsv", goal=0.05),
    Collection("hotpotqa-dev500", "dev", OWN_CANDIDATES, 10, goal=0.90, absolute=True),
    Collection("2wiki-101", "dev"),
    Collection("med", "test"),
    Collection("ko-autorag", "test"),
    Collection("xquad-de", "dev", limit=300),
    Collection("xquad-zh", "dev", limit=300),
)


def own_candidates(folder: Path, dataset: Dataset) -> Candidates:
    """``candidates.jsonl`` of the collection, each list in an order drawn by its query's id."""
    listed = {
        str(row["query-id"]): [*map(str, row["positives"]), *map(str, row["negatives"])]
        for _, row in read_rows(folder / OWN_CANDIDATES)
    }
    run = {}
    for query_id in dataset.queries:
        ids = listed.get(query_id, [])
        random.Random(query_id).shuffle(ids)
        run[query_id] = {doc_id: float(len(ids) - i) for i, doc_id in enumerate(ids)}
    settings = {
        "retriever": OWN_CANDIDATES,
        "identical_ids_removed": False,
        "queries": digest(dataset.queries),
    }
    documents = read_corpus(folder, {doc_id for scores in run.values() for doc_id in scores})
    return Candidates(run, documents, max(map(len, run.values())), OWN_CANDIDATES, settings)


def table_systems(main: AttentionSystem) -> list[System | FusedSystem]:
    """The shipped heads in both windows, CoRe's, all and random heads, generation, and fusions."""
    config = packaged_files()[CORE_HEADS]
    core = AttentionSystem(
        "core-heads", main.model, "core", 1, config, main.backend, None, engine=main.engine
    )
    ranked: list[System] = [
        main,
        with_strategy(main, "core", "all", "listwise"),
        core,
        with_strategy(core, "core", "all", "core-heads-listwise"),
        with_strategy(main, "icr", 1, "all-heads"),
        with_strategy(main, "icr", "all", "all-heads-listwise"),
        *(with_random_heads(main, seed) for seed in RANDOM_SEEDS),
    ]
    if main.backend == "vllm":
        ranked.append(GenerationSystem("rankgpt", main.model, main.engine))
    fused = [FusedSystem(f"{s.name}+{FUSION}", s.name, FUSION) for s in ranked[:2]]
    return [*ranked, *fused]


def run_table(
    collections: Sequence[Collection],
    systems: Sequence[System | FusedSystem],
    data: Path,
    output: Path,
    batch: int,
) -> list[tuple[Collection, Report]]:
    """Evaluate all of them; engines are the outer loop, since starting them takes longest."""
    ready = []
    for collection in collections:
        dataset, folder = collection.load(data), output / collection.name
        make_folder(folder)
        ready.append((collection, dataset, collection.candidates(dataset, data, folder), folder))
    ranked = [system for system in systems if not isinstance(system, FusedSystem)]

    with engines_for(ranked) as engines:
        for group in by_engine(ranked):
            for _, dataset, candidates, folder in ready:
                rank(dataset, group, candidates, engines, output=folder, batch=batch, progress=True)
    # The reports take processor time alone: no engine holds a GPU meanwhile.
    return [
        (
            collection,
            evaluate(
                dataset,
                systems,
                candidates,
                output=folder,
                batch=batch,
                relevance_level=2 if collection.name.startswith("trec-dl") else 1,
            ),
        )
        for collection, dataset, candidates, folder in ready
    ]


def markdown(results: Sequence[tuple[Collection, Report]]) -> str:
    """Systems by collections: nDCG@10, and the gain over the first stage with its interval."""
    names = [system.name for system in results[0][1].systems]
    head = ["nDCG@10", *(f"{c.name} ({len(r.dataset.queries)})" for c, r in results)]
    rows = [head, ["---"] * len(head)]
    rows += [[name, *(_cell(report[name]) for _, report in results)] for name in names]
    rows.append(["goal", *(_goal(collection) for collection, _ in results)])
    costs = ["seconds a query", *([""] * len(results))]
    rows.append(costs)
    rows += [
        [name, *(f"{report[name].cost.seconds_per_query:.3g}" for _, report in results)]
        for name in names
        if name != FIRST_STAGE and "+" not in name
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _ndcg(system: SystemReport) -> float:
    return system.means["nDCG@10"]


def _cell(system: SystemReport) -> str:
    change, failed = system.comparison, len(system.failed)
    told = f" ({failed} failed)" if failed else ""
    if change is None:
        return f"{_ndcg(system):.3f}{told}"
    gain = f"{change.difference:+.3f}; {change.low:+.3f} to {change.high:+.3f}"
    return f"{_ndcg(system):.3f} ({gain}){told}"


def _goal(collection: Collection) -> str:
    if collection.goal is None:
        return ""
    return f"{collection.goal:.2f}" if collection.absolute else f"{collection.goal:+.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: evaluate, write ``table.md`` and every collection's folder, print the table."""
    names = [collection.name for collection in COLLECTIONS]
    parser = argparse.ArgumentParser(prog="python -m core_rerank.eval.quality_table")
    add = parser.add_argument
    add("--data", type=Path, required=True, help="holds the collections' folders")
    add("--output", "-o", type=Path, required=True, help="for the results")
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    add("--systems", nargs="+", metavar="NAME", help="of the systems; by default all")
    add("--model", default="smollm2-135m-instruct", help="the model's folder or alias")
    add("--backend", choices=("vllm", "transformers"), default="vllm")
    add("--dtype", help="the engine's; by default its own choice")
    add("--limit", type=int, help="so many queries of each collection at most")
    add("--batch", type=int, default=64, help="queries ranked together")
    arguments = parser.parse_args(argv)
    chosen = [c for c in COLLECTIONS if c.name in arguments.only]
    if arguments.limit is not None:
        most = arguments.limit
        chosen = [replace(c, limit=min(most, c.limit or most)) for c in chosen]
    options = {"dtype": arguments.dtype} if arguments.dtype else {}
    from core_rerank.commands.terminal import quiet_engine

    with quiet_engine(False):
        main_system = attention_system(
            arguments.model, name="core-rerank", window=1, backend=arguments.backend, **options
        )
        systems = table_systems(main_system)
        if arguments.systems:
            unknown = set(arguments.systems) - {system.name for system in systems}
            if unknown:
                parser.error(
                    f"no system {', '.join(unknown)}: {', '.join(s.name for s in systems)}"
                )
            systems = [system for system in systems if system.name in arguments.systems]
        results = run_table(chosen, systems, arguments.data, arguments.output, arguments.batch)
    table = markdown(results)
    write_whole(arguments.output / "table.md", table)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
