"""Finds heads that screen documents, and measures them inside candidate lists.

    python -m core_rerank.eval.screening find FOLDER --attacks bipia_find.jsonl \\
        --store ht.safetensors --max-layers 19 --output heads.yaml
    python -m core_rerank.eval.screening measure FOLDER --attacks bipia_held.jsonl \\
        --heads heads.yaml --output DIR

FOLDER is a BEIR folder with candidates.jsonl. Every query's list gets three planted copies of its
candidates (see ``planting``). ``measure`` reranks the lists with ``screen=True`` and writes
screening.json and screening.md: how well the scores tell planted documents, by place, and what
nDCG@10 is without attackers, with them, and when flagged documents are dropped.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from core_rerank.injection_choice import InjectionSelection, choose_injection_heads
from core_rerank.injection_finding import METHODS
from core_rerank.injection_heads import InjectionHeads
from core_rerank.injection_measuring import (
    InjectionAttention,
    InjectionMeasurement,
    Wanted,
    load_measured,
    measuring_options,
)
from core_rerank.labelled_queries import load_labelled_queries
from core_rerank.prompt import DEFAULT_MAX_TOKENS_PER_DOC, PromptBuilder
from core_rerank.screening import document_masses, screening_request
from core_rerank.versions import package_versions

from .files import digest, make_folder, write_whole
from .injection import RATES, LabelledScores, measure, table
from .measures import mean, ndcg
from .planting import (
    PLACES,
    PlantedDocument,
    PlantedList,
    planted_lists,
    read_attacks,
    without_cut_attacks,
)

if TYPE_CHECKING:
    from core_rerank import Ranking, Reranker
    from hook_runtime.backend import CaptureBackend
    from hook_runtime.specs import ModelInfo

BATCH_QUERIES = 4


def measure_documents(
    backend: CaptureBackend,
    lists: Sequence[PlantedList],
    *,
    model: ModelInfo,
    data: str,
    on_progress: Callable[[int, int], None] | None = None,
) -> InjectionAttention:
    """Every head at the last token of each document's pointwise ranking prompt."""
    import numpy as np

    builder = PromptBuilder(backend.tokenizer, model.max_model_len, DEFAULT_MAX_TOKENS_PER_DOC)
    given, lists = lists, _whole(lists, builder)
    masses, tokens = [], []
    for start in range(0, len(lists), BATCH_QUERIES):
        prompts = [
            builder.build(one.query, [item.document.full_text])
            for one in lists[start : start + BATCH_QUERIES]
            for item in one.documents
        ]
        captures = backend.capture([screening_request(prompt, "all") for prompt in prompts])
        shape = (model.layers_kept, model.num_heads, 2)
        masses += [document_masses(capture)[:, 0].reshape(shape) for capture in captures]
        tokens += [end - begin for prompt in prompts for begin, end in prompt.document_spans]
        if on_progress is not None:
            on_progress(min(start + BATCH_QUERIES, len(lists)), len(lists))
    documents = [(one.query_id, item) for one in lists for item in one.documents]
    return InjectionAttention(
        masses=np.stack(masses).astype(np.float32),
        tokens=np.array(tokens, np.int32),
        attack=np.array([item.place is not None for _, item in documents]),
        groups=tuple(query_id for query_id, _ in documents),
        measurement=InjectionMeasurement(
            model=model,
            data=data,
            data_hash=_data_hash(given),
            instruction="",
            prompt_hash=digest(list(builder.build("query", ["document"]).token_ids)),
            versions=package_versions(),
        ),
    )


def _data_hash(lists: Sequence[PlantedList]) -> str:
    """Of all but the attacks, which are in the documents."""
    rows = [[asdict(item) for item in one.documents] for one in lists]
    return digest([[{k: v for k, v in row.items() if k != "attack"} for row in r] for r in rows])


def _whole(lists: Sequence[PlantedList], builder: PromptBuilder) -> list[PlantedList]:
    """Those without cut attacks, saying how many copies were left out."""
    whole = without_cut_attacks(lists, builder)
    before, after = (sum(len(one.documents) for one in each) for each in (lists, whole))
    if after < before:
        print(f"{before - after} planted copies left out: their attack was cut off")
    return whole


@dataclass(frozen=True, slots=True)
class ListQuality:
    """nDCG@10 of the same queries: clean lists, with attackers, and with a screen that drops.

    ``oracle`` drops exactly the attackers, so it is the clean lists' own quality; ``clean_dropped``
    is what false alarms cost where nobody attacks. ``first`` is the share of lists that an attacker
    leads, without and with the screen.
    """

    clean: float
    clean_dropped: float
    attacked: float
    attacked_dropped: float
    first: float
    first_dropped: float


def list_quality(lists: Sequence[PlantedList], rankings: Sequence[Ranking]) -> ListQuality:
    """From rankings of whole lists with flags; one document a prompt, so that lists may be cut."""
    qrels = {
        one.query_id: {str(item.document.doc_id): int(item.relevant) for item in one.documents}
        for one in lists
    }

    def quality(keep: Callable[[PlantedDocument, bool], bool]) -> tuple[float, float]:
        run, led = {}, 0
        for one, ranking in zip(lists, rankings, strict=True):
            kept = [d for d in ranking if keep(one.documents[d.index], d.flagged)]
            run[one.query_id] = {str(d.document.doc_id): float(-d.rank) for d in kept}
            led += bool(kept) and one.documents[kept[0].index].place is not None
        return mean(ndcg(qrels, run)), led / len(lists)

    attacked, first = quality(lambda *_: True)
    dropped, first_dropped = quality(lambda _, flagged: not flagged)
    return ListQuality(
        clean=quality(lambda item, _: item.place is None)[0],
        clean_dropped=quality(lambda item, flagged: item.place is None and not flagged)[0],
        attacked=attacked,
        attacked_dropped=dropped,
        first=first,
        first_dropped=first_dropped,
    )


def screened_scores(
    lists: Sequence[PlantedList], rankings: Sequence[Ranking], threshold: float, data: str
) -> list[LabelledScores]:
    """The scores of all documents, then those of each place against all clean ones; and length."""
    import numpy as np

    items = [
        (one.documents[d.index].place, d.injection, len(d.document.full_text))
        for one, ranking in zip(lists, rankings, strict=True)
        for d in ranking
        if d.injection is not None
    ]
    places = np.array([place or "" for place, _, _ in items])
    scores = np.array([score for _, score, _ in items], float)
    lengths = np.array([length for _, _, length in items], float)

    def part(
        name: str, values: np.ndarray, which: np.ndarray, set_at: float | None
    ) -> LabelledScores:
        attack = places[which] != ""
        thresholds = {} if set_at is None else {RATES[0]: set_at}
        return LabelledScores(name, data, values[which], attack, thresholds)

    every = np.ones(len(items), bool)
    by_place = [
        part(f"screen, {p}", scores, (places == "") | (places == p), threshold) for p in PLACES
    ]
    whole = part("screen", scores, every, threshold)
    return [whole, *by_place, part("length alone", lengths, every, None)]


def _lists(given: argparse.Namespace) -> list[PlantedList]:
    queries = load_labelled_queries(given.folder, given.limit, given.negatives)
    lists = planted_lists(queries, read_attacks(given.attacks), given.seed)
    if len(lists) < len(queries):
        print(f"{len(queries) - len(lists)} queries left out: they have fewer than two negatives")
    return lists


def _find(given: argparse.Namespace) -> None:
    from core_rerank.backends import name_model

    lists = _lists(given)
    if given.store.is_file():
        model_id = name_model(given.model, given.backend).model_id
        wanted = Wanted(model_id, given.backend, _data_hash(lists), layers=given.max_layers)
        attention = load_measured(given.store, wanted)
    else:
        attention = _measured(given, lists)
        attention.save(given.store)
    selection = InjectionSelection(
        given.method, given.top, max_layers=given.max_layers, fpr=given.fpr, task="document"
    )
    chosen = choose_injection_heads([attention], [], selection)
    print("\n".join(chosen.lines()))
    aliases = [given.model] if "/" not in given.model else []
    about = {"aliases": tuple(aliases), "source": "found by core_rerank.eval.screening find"}
    chosen.heads.model_copy(update=about).to_yaml(given.output)


def _measured(given: argparse.Namespace, lists: Sequence[PlantedList]) -> InjectionAttention:
    from core_rerank.backends import name_model, open_backend
    from core_rerank.commands.terminal import counting

    resolved = name_model(given.model, given.backend)
    options = {**measuring_options(given.backend), "layers": given.max_layers}
    opened = open_backend(given.backend, resolved, None, options)
    try:
        with counting("Reading attention, queries") as on_progress:
            return measure_documents(
                opened.backend,
                lists,
                model=opened.model,
                data=f"{given.folder.name} + {given.attacks.stem}",
                on_progress=on_progress,
            )
    finally:
        opened.close()


def _measure(given: argparse.Namespace) -> None:
    from core_rerank import Reranker

    heads = InjectionHeads.from_yaml(given.heads)
    lists = _lists(given)
    make_folder(given.output)
    with Reranker(
        given.model, window=1, backend=given.backend, screen=True, screen_heads=heads
    ) as reranker:
        builder = PromptBuilder(
            reranker.backend.tokenizer, reranker.model.max_model_len, reranker.max_tokens_per_doc
        )
        lists = _whole(lists, builder)
        rankings = _rank(reranker, lists)
    rows = [
        measure(scores)
        for scores in screened_scores(lists, rankings, heads.threshold, given.folder.name)
    ]
    quality = list_quality(lists, rankings)
    report = {
        "heads": [str(head) for head in heads.heads],
        "threshold": heads.threshold,
        "queries": len(lists),
        "rows": [asdict(row) for row in rows],
        "ndcg@10": asdict(quality),
    }
    text = table(rows) + "\n" + quality_table(quality)
    write_whole(given.output / "screening.json", f"{json.dumps(report, indent=1)}\n")
    write_whole(given.output / "screening.md", text)
    print(text, end="")


def _rank(reranker: Reranker, lists: Sequence[PlantedList]) -> list[Ranking]:
    tasks = [(one.query, [item.document for item in one.documents]) for one in lists]
    return reranker.rerank_batch(tasks, progress=True)


def quality_table(quality: ListQuality) -> str:
    """In Markdown."""
    return (
        "| lists | nDCG@10 | nDCG@10, flagged dropped | led by an attacker | the same, dropped |\n"
        "|---|---|---|---|---|\n"
        f"| clean | {quality.clean:.3f} | {quality.clean_dropped:.3f} | | |\n"
        f"| three planted copies | {quality.attacked:.3f} | {quality.attacked_dropped:.3f} | "
        f"{quality.first:.0%} | {quality.first_dropped:.0%} |\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m core_rerank.eval.screening",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, run, limit, negatives in (("find", _find, 30, 3), ("measure", _measure, 45, 9)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("folder", type=Path)
        command.add_argument("--attacks", type=Path, required=True, metavar="JSONL")
        command.add_argument("--limit", type=int, default=limit, help="queries")
        command.add_argument("--negatives", type=int, default=negatives, help="of each query")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--model", default="smollm2-135m-instruct")
        command.add_argument("--backend", default="vllm", choices=["vllm", "transformers"])
        command.add_argument("--output", type=Path, required=True)
        if name == "find":
            command.add_argument("--store", type=Path, required=True, metavar="SAFETENSORS")
            command.add_argument("--method", default="k-sigma", choices=METHODS)
            command.add_argument("--top", type=int, default=8)
            command.add_argument("--max-layers", type=int)
            command.add_argument("--fpr", type=float, default=0.01)
        else:
            command.add_argument("--heads", type=Path, required=True, metavar="YAML")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one of the two commands."""
    given = _parser().parse_args(arguments)
    given.run(given)


if __name__ == "__main__":
    main()
