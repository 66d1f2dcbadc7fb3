"""Reranker: the whole path from a query and documents to a ranking."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from hook_runtime.backend import AsyncCaptureBackend, CaptureBackend
from hook_runtime.specs import Capture, CaptureRequest, Head, ModelInfo

from .backends import OpenBackend, name_model, open_backend
from .calibration import NullPassMemory
from .errors import ClosedError, NotFiniteError
from .heads import HeadSet, Window
from .injection_heads import InjectionHeads
from .inputs import RerankInput, check_input, check_top_n
from .models import ResolvedModel
from .passes import Attention, PassReader, Plan
from .prompt import DEFAULT_MAX_TOKENS_PER_DOC, PromptBuilder
from .ranking import ScoredDocument, build_ranking
from .scoring import score_document
from .screening import Screen
from .settings import (
    check_settings,
    check_strategy,
    check_window,
    choose_calibration,
    choose_head_set,
    choose_heads,
    choose_screen,
    choose_window,
)
from .types import DocId, Document, Ranking

if TYPE_CHECKING:
    import numpy as np

DEFAULT_MODEL = "smollm2-135m-instruct"
Documents = Iterable[str | Document]


class Reranker:
    """Ranks documents by the attention that a query's tokens pay to them.

    Calls may come from several threads. Close it, or use it as a context manager, to free the
    model.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        heads: HeadSet | Iterable[object] | None = None,
        config: str | os.PathLike[str] | None = None,
        backend: str | CaptureBackend = "vllm",
        window: Window | None = None,
        strategy: str = "core",
        calibrate: bool | None = None,
        max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC,
        screen: bool | Literal["flag", "drop"] = False,
        screen_heads: InjectionHeads | str | os.PathLike[str] | None = None,
        **engine: Any,
    ) -> None:
        """Load ``model`` and its retrieval heads.

        Args:
            model: an alias, a Hugging Face id or a local folder; a running ``backend`` has its
                own model, and this one is not looked at.
            heads: a `HeadSet`, or heads such as ``"15-7"`` or ``(15, 7)``; by default the
                packaged head set of the model.
            config: path of a head set's YAML, instead of ``heads``.
            backend: "vllm"; "vllm-async", whose callers share the engine's batches (many threads,
                or ``arerank``) and which takes ``data_parallel_size``; "transformers"; or a
                running `CaptureBackend`, which stays open when the reranker is closed.
            window: documents per prompt: "all" (listwise) or a number, 1 being pointwise; by
                default what the head set recommends. Each prompt is normalised by itself, so
                windows between 1 and "all" compare documents across prompts less well.
            strategy: "core" (selected heads, token filter), "icr" (every head, token filter) or
                "qr" (selected heads; instruction, query and suffix look; no filter).
            calibrate: subtract the attention under the null query "N/A"; by default what the head
                set says, which is yes for most.
            max_tokens_per_doc: longer documents are cut, and flagged.
            screen: read in the same engine batch how suspicious each document is of holding
                orders for the model. True or "flag" marks documents, "drop" leaves flagged ones
                out; scores and order of the others stay the same. Needs window 1.
            screen_heads: what ``screen`` reads, or the path of its YAML; by default the packaged
                ones of the model.
            **engine: passed to the backend: for vLLM any argument of ``vllm.LLM``; for
                transformers ``dtype``, ``device``, ``max_model_len``; for both ``layers``, by
                default only those that the heads need.

        Raises:
            ModelError, HeadSetError: no such model; no head set for it, or another model's.
            MissingDependencyError: vLLM or torch is not installed.
            TypeError, ValueError: an argument is of the wrong type or out of range.
            hook_runtime.errors.HookRuntimeError: the engine cannot capture this model exactly.
        """
        self._strategy = check_strategy(strategy)
        check_settings(calibrate, max_tokens_per_doc)
        window = None if window is None else check_window(window)
        resolved = name_model(model, backend)
        self._head_set = choose_head_set(heads, config, self._strategy, resolved.model_id)
        self._heads = choose_heads(heads, self._head_set, self._strategy)
        window = choose_window(window, self._head_set)
        calibrate = choose_calibration(calibrate, self._head_set if self._heads else None)
        self._screen = choose_screen(screen, screen_heads, resolved.model_id, window)
        self._closed = False
        self._open = self._open_backend(backend, resolved, engine)
        try:
            if self._head_set is not None and self._heads is not None:
                self._head_set.check(self._open.model, self._open.model_id)
            self._open.model.check_heads(self._heads or ())
            if self._screen is not None:
                self._screen.heads.check(self._open.model, self._open.model_id, "document")
            self._reader = PassReader(
                builder=PromptBuilder(
                    self._open.backend.tokenizer, self._open.model.max_model_len, max_tokens_per_doc
                ),
                model=self._open.model,
                strategy=self._strategy,
                heads=self._heads,
                weights=self._head_set.weights if self._head_set and self._heads else None,
                window=window,
                calibrated=calibrate,
                null_passes=NullPassMemory(),
                screen=self._screen,
            )
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._open.model

    @property
    def model_id(self) -> str:
        """The id that head sets are looked up by."""
        return self._open.model_id

    @property
    def head_set(self) -> HeadSet | None:
        """The head set in use; None where heads were given as a list, or every head is read."""
        return self._head_set if self._heads is not None else None

    @property
    def heads(self) -> tuple[Head, ...] | None:
        """The heads that are read; None means every head of every layer."""
        return self._heads

    @property
    def screen(self) -> Screen | None:
        """How documents are screened; None where they are not."""
        return self._screen

    @property
    def _heads_read(self) -> tuple[Head, ...] | None:
        """Those of the ranking and of the screen."""
        if self._screen is None or self._heads is None:
            return self._heads
        return tuple(dict.fromkeys((*self._heads, *self._screen.heads.heads)))

    @property
    def window(self) -> Window:
        """Documents per prompt."""
        return self._reader.window

    @property
    def max_tokens_per_doc(self) -> int:
        """Longer documents are cut to so many tokens."""
        return self._reader.builder.max_tokens_per_doc

    @property
    def strategy(self) -> str:
        """Name of the scoring strategy."""
        return self._strategy.name

    @property
    def shares_batches(self) -> bool:
        """Whether calls that run at the same time share the engine, and cancelling frees it."""
        return isinstance(self._open.backend, AsyncCaptureBackend)

    def check_health(self) -> None:
        """Raise ClosedError after ``close()``, EngineDeadError once an engine process is gone.

        Quick, and asks the engine nothing.
        """
        self._check_open()
        if isinstance(self._open.backend, AsyncCaptureBackend):
            self._open.backend.check_health()

    def rerank(
        self,
        query: str,
        documents: Documents,
        *,
        doc_ids: Iterable[DocId] | None = None,
        top_n: int | None = None,
        explain: bool = False,
        max_tokens_per_doc: int | None = None,
    ) -> Ranking:
        """Rank ``documents``, best first; all of them unless ``top_n`` says fewer.

        Args:
            query: what is looked for.
            documents: strings or `Document`s, in any iterable; never changed.
            doc_ids: one for each, all different; instead of the documents' own.
            top_n: how many to return, from 1.
            explain: give every document's `TokenScore`s.
            max_tokens_per_doc: cut documents shorter than the reranker does; never longer.

        Raises:
            TypeError: the query is no string, or a document is neither a string nor a Document.
            ValueError: a blank query; ``top_n`` below 1; ids too few, too many or equal; or a
                PromptError: the query or the window does not fit the model.
            NotFiniteError: the engine returned NaN; names the document.
            ClosedError: after ``close()``.
        """
        self._check_open()
        given = check_input(query, documents, doc_ids, max_tokens_per_doc)
        return self._rerank([given], check_top_n(top_n), explain)[0]

    async def arerank(
        self,
        query: str,
        documents: Documents,
        *,
        doc_ids: Iterable[DocId] | None = None,
        top_n: int | None = None,
        explain: bool = False,
        max_tokens_per_doc: int | None = None,
    ) -> Ranking:
        """As ``rerank``, leaving the event loop free meanwhile.

        With ``backend="vllm-async"``, calls that run at the same time share the engine's batches,
        and cancelling one frees what it had in the engine; with other backends they take turns
        in threads.
        """
        self._check_open()
        given = [check_input(query, documents, doc_ids, max_tokens_per_doc)]
        top_n = check_top_n(top_n)
        plans = await asyncio.to_thread(self._plan_all, given)
        unread = self._reader.unread(plans)
        captures = await self._capture_unread(unread)
        attention = self._reader.attention(plans, unread, captures)
        rankings = await asyncio.to_thread(self._rank_all, given, plans, attention, top_n, explain)
        return rankings[0]

    def rerank_batch(
        self,
        tasks: Iterable[tuple[str, Documents]],
        *,
        top_n: int | None = None,
        explain: bool = False,
        progress: bool = False,
    ) -> list[Ranking]:
        """Rank each (query, documents) of ``tasks``, all in one engine batch; in their order.

        ``progress`` shows the engine's progress; the rest is as in ``rerank``, whose errors here
        carry a note with the number of the task.
        """
        self._check_open()
        return self._rerank(_check_tasks(tasks), check_top_n(top_n), explain, progress)

    def close(self) -> None:
        """Free the model, unless the backend was given; further calls raise. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._open.close()

    def __enter__(self) -> Reranker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_backend(
        self, backend: str | CaptureBackend, resolved: ResolvedModel, engine: Mapping[str, Any]
    ) -> OpenBackend:
        """The running backend to read from, and how to let go of it."""
        return open_backend(backend, resolved, self._heads_read, engine)

    def _rerank(
        self,
        inputs: Sequence[RerankInput],
        top_n: int | None,
        explain: bool,
        progress: bool = False,
    ) -> list[Ranking]:
        plans = self._plan_all(inputs)
        unread = self._reader.unread(plans)
        captures = []
        if unread:
            captures = self._open.backend.capture(list(unread.values()), progress=progress)
        attention = self._reader.attention(plans, unread, captures)
        return self._rank_all(inputs, plans, attention, top_n, explain)

    def _plan_all(self, inputs: Sequence[RerankInput]) -> list[Plan]:
        plans = []
        for number, given in enumerate(inputs):
            with _naming_task(number, of=len(inputs)):
                plans.append(self._reader.plan(given))
        return plans

    def _rank_all(
        self,
        inputs: Sequence[RerankInput],
        plans: Sequence[Plan],
        attention: Attention,
        top_n: int | None,
        explain: bool,
    ) -> list[Ranking]:
        scored = []
        for number, (given, plan) in enumerate(zip(inputs, plans, strict=True)):
            with _naming_task(number, of=len(inputs)):
                scored.append(self._score(given, plan, attention))
        return [
            build_ranking(
                given,
                documents,
                model=self.model_id,
                strategy=self.strategy,
                top_n=top_n,
                explain=explain,
                prompt_tokens=sum(len(reading.query.request.prompt_token_ids) for reading in plan),
                screen=self._screen,
            )
            for given, plan, documents in zip(inputs, plans, scored, strict=True)
        ]

    async def _capture_unread(self, unread: dict[bytes, CaptureRequest]) -> list[Capture]:
        backend, requests = self._open.backend, list(unread.values())
        if not requests:
            return []
        if isinstance(backend, AsyncCaptureBackend):
            return await backend.acapture(requests)
        return await asyncio.to_thread(backend.capture, requests)

    def _score(self, given: RerankInput, plan: Plan, attention: Attention) -> list[ScoredDocument]:
        scored = []
        for reading in plan:
            tokens = reading.tokens(attention)
            prompt, start = reading.window.prompt, 0
            for place, offsets, truncated, injection in zip(
                reading.window.places,
                prompt.offsets,
                prompt.truncated,
                reading.injection(attention),
                strict=True,
            ):
                part = tokens[start : start + len(offsets)]
                start += len(offsets)
                _check_finite(part, place, given)
                score = score_document(part, token_filter=self._reader.filters_tokens)
                scored.append(ScoredDocument(place, score, truncated, offsets, injection))
        return scored

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this Reranker for {self.model_id} was closed: create a new one.")


def _check_tasks(tasks: Iterable[tuple[str, Documents]]) -> list[RerankInput]:
    checked = []
    for number, task in enumerate(tasks):
        if not isinstance(task, tuple | list) or len(task) != 2:
            raise TypeError(f"task {number} is not a (query, documents) pair: {task!r:.80}.")
        with _naming_task(number):
            checked.append(check_input(*task))
    return checked


@contextmanager
def _naming_task(number: int, of: int = 2) -> Iterator[None]:
    """Note on an error which task of a batch it belongs to; a batch of one needs no note."""
    try:
        yield
    except (TypeError, ValueError, NotFiniteError) as error:
        if of > 1:
            error.add_note(f"in task {number} of the batch")
        raise


def _check_finite(tokens: np.ndarray, place: int, given: RerankInput) -> None:
    import numpy as np

    if not np.isfinite(tokens).all():
        doc_id = given.doc_ids[place]
        named = "" if doc_id is None else f" (id {doc_id!r})"
        raise NotFiniteError(
            f"the engine returned attention that is not finite for document {place}{named}: "
            "nothing can be ranked by it. Use dtype='bfloat16' or 'float32' if float16 overflows."
        )
