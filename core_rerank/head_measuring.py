"""One engine pass over labelled queries: every head's attention to every document."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, ModelInfo

from .errors import NotFiniteError
from .head_attention import HeadAttention, Measurement, QueryAttention, Rows
from .head_store import AttentionStore
from .heads import Window
from .labelled_queries import LabelledQuery
from .prompt import DEFAULT_MAX_TOKENS_PER_DOC, Prompt, PromptBuilder
from .settings import check_window
from .versions import package_versions
from .windows import split_windows

if TYPE_CHECKING:
    import numpy as np

    from hook_runtime.backend import CaptureBackend

POSITIONS = 5


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """How to measure.

    Attributes:
        window: documents in one prompt: 1, N or "all".
        rows: the tokens that look: "query" as with the strategies core and icr, or "instruction"
            (to the end of the prompt) as with qr.
        orders: how many orders of the documents each query is measured in; the mean is kept. CoRe
            (arXiv 2510.02219) takes 5. With window 1 there is no order.
        with_null: measure the null query "N/A" too, for calibration.
        max_tokens_per_doc: longer documents are cut.
        seed: of the orders (see ``document_order``).

    Raises:
        ValueError: a window, rows or orders that there is not.
    """

    window: Window = 1
    rows: Rows = "query"
    orders: int = 1
    with_null: bool = True
    max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC
    seed: int = 0

    def __post_init__(self) -> None:
        check_window(self.window)
        if self.rows not in ("query", "instruction"):
            raise ValueError(f"rows must be 'query' or 'instruction', not {self.rows!r}.")
        if not 1 <= self.orders <= POSITIONS:
            raise ValueError(f"orders must be 1 to {POSITIONS}, not {self.orders!r}.")
        if self.window == 1 and self.orders > 1:
            raise ValueError(
                f"orders={self.orders} measures the same prompts again with window 1: use orders=1."
            )


def measure_attention(
    backend: CaptureBackend,
    queries: Sequence[LabelledQuery],
    settings: MeasureSettings | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    model: ModelInfo | None = None,
    data: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> HeadAttention:
    """Every head's attention to every document of every query.

    What an engine batch holds depends on its query alone, so that a run that was stopped and gone
    on with asks the engine for just what one run would have asked.

    Args:
        backend: runs the model, with all its layers or the first few.
        queries: with their positives and hard negatives; their ids are all different.
        settings: how to measure.
        store: a folder to keep each query in as soon as it is measured; queries that it holds
            already are not measured again. None: in memory only.
        model: what to say of the model, where more is known than ``backend.model`` says.
        data: what the queries are called in the head set.
        on_progress: called with (queries done, queries in all).

    Raises:
        PromptError: the documents of a prompt do not fit the model.
        NotFiniteError: the engine returned NaN or infinity.
        DataError: the store was made from other inputs, is damaged or in use.
        ValueError: there are no queries, or two have the same id.
    """
    settings = settings or MeasureSettings()
    _check_queries(queries)
    info = model or backend.model
    builder = PromptBuilder(backend.tokenizer, info.max_model_len, settings.max_tokens_per_doc)
    measurement = Measurement(
        model=info,
        data=data,
        prompt_hash=_digest(builder.build("query", ["document"]).token_ids),
        versions=package_versions(),
        **inputs_without_engine(queries, settings),
    )
    documents = [len(q.positives) + len(q.negatives) for q in queries]
    kept = None if store is None else AttentionStore.create(store, measurement, documents)
    measured: list[QueryAttention] = []
    with kept.writing() if kept else nullcontext():
        todo = kept.missing() if kept else list(range(len(queries)))
        done = len(queries) - len(todo)
        for row in todo:
            one = _measure_query(backend, builder, queries[row], row, settings, info)
            if kept:
                kept.put(row, one)
            else:
                measured.append(one)
            done += 1
            if on_progress is not None:
                on_progress(done, len(queries))
    return kept.load() if kept else HeadAttention.of(measured, max(documents), measurement)


def inputs_without_engine(
    queries: Sequence[LabelledQuery], settings: MeasureSettings
) -> dict[str, Any]:
    """The part of a ``Measurement`` that is known before a model is loaded."""
    return {
        "data_hash": _digest(queries),
        "query_ids": tuple(query.query_id for query in queries),
        "window": settings.window,
        "rows": settings.rows,
        "orders": settings.orders,
        "with_null": settings.with_null,
        "max_tokens_per_doc": settings.max_tokens_per_doc,
        "seed": settings.seed,
    }


def document_order(query: LabelledQuery, row: int, seed: int, turn: int = 0) -> list[int]:
    """The documents of the ``row``-th query (numbered, positives first) in a prompt's order.

    The first five positives stand at five evenly spread positions, from the first to the last, and
    move on by one with each ``row`` and each ``turn``: over five queries, or five turns of one, a
    positive is at each equally often, so that a head that likes a position gains nothing. The rest
    is shuffled by ``seed``, the query's id and ``turn``.
    """
    total = len(query.positives) + len(query.negatives)
    slots = [round(i * (total - 1) / (POSITIONS - 1)) for i in range(POSITIONS)]
    slots = list(dict.fromkeys(slots))
    placed = {
        slots[(row + turn + i) % len(slots)]: i
        for i in range(min(len(query.positives), len(slots)))
    }
    rest = [i for i in range(total) if i not in placed.values()]
    name = f"{seed} {query.query_id}" + (f" {turn}" if turn else "")
    random.Random(name).shuffle(rest)
    left = iter(rest)
    return [placed[place] if place in placed else next(left) for place in range(total)]


@dataclass(frozen=True, slots=True)
class _Pass:
    """One prompt of a query: ``places`` are its documents' rows in `QueryAttention`."""

    places: tuple[int, ...]
    prompt: Prompt
    is_null: bool

    def request(self, rows: Rows) -> CaptureRequest:
        prompt = self.prompt
        probe = AttentionProbe("all", prompt.rows(rows), prompt.document_spans, "documents")
        return CaptureRequest(prompt.token_ids, probe)


def _measure_query(
    backend: CaptureBackend,
    builder: PromptBuilder,
    query: LabelledQuery,
    row: int,
    settings: MeasureSettings,
    info: ModelInfo,
) -> QueryAttention:
    import numpy as np

    total = len(query.positives) + len(query.negatives)
    shape = (total, info.layers_kept, info.num_heads)
    sums = np.zeros((2, *shape))
    tokens = np.zeros(total, np.int32)
    passes = list(_passes(builder, query, row, settings))
    captures = backend.capture([one.request(settings.rows) for one in passes])
    for one, capture in zip(passes, captures, strict=True):
        _add(sums[int(one.is_null)], one, capture, query.query_id)
        for place, (start, end) in zip(one.places, one.prompt.document_spans, strict=True):
            tokens[place] = end - start
    means = (sums / settings.orders).astype(np.float32)
    positive = np.arange(total) < len(query.positives)
    return QueryAttention(means[0], means[1] if settings.with_null else None, tokens, positive)


def _add(target: np.ndarray, one: _Pass, capture: Capture, query_id: str) -> None:
    import numpy as np

    if not np.isfinite(capture.values).all():
        raise NotFiniteError(
            f"the engine returned attention that is not finite for query {query_id!r}: "
            "use dtype float32."
        )
    for column, place in enumerate(one.places):
        target[place] += capture.values[:, column].reshape(target.shape[1:])


def _passes(
    builder: PromptBuilder, query: LabelledQuery, row: int, settings: MeasureSettings
) -> Iterator[_Pass]:
    documents = (*query.positives, *query.negatives)
    for turn in range(settings.orders):
        order = document_order(query, row, settings.seed, turn)
        for places in split_windows(order, settings.window):
            prompt = builder.build(query.query, [documents[i].full_text for i in places])
            yield _Pass(places, prompt, False)
            if settings.with_null:
                yield _Pass(places, builder.null(prompt), True)


def _check_queries(queries: Sequence[LabelledQuery]) -> None:
    if not queries:
        raise ValueError("no labelled queries were given: there is nothing to learn from.")
    seen: set[str] = set()
    for query in queries:
        if query.query_id in seen:
            raise ValueError(f"query {query.query_id!r} is there twice: give each query once.")
        seen.add(query.query_id)


def _digest(value: object) -> str:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
