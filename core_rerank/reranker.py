"""Reranker: the whole path from a query and documents to a ranking."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hook_runtime.backend import AsyncCaptureBackend, CaptureBackend
from hook_runtime.specs import Head, ModelInfo

from .answering import answer_prompt
from .backends import OpenBackend, name_model, open_backend
from .calibration import NullPassMemory
from .errors import ClosedError
from .heads import HeadSet, Window
from .injection_heads import InjectionHeads
from .inputs import RerankInput, check_input, check_tasks, check_top_n, naming_task
from .models import ResolvedModel
from .passes import Attention, HeadAttention, PassReader, Plan
from .prompt import DEFAULT_MAX_TOKENS_PER_DOC, PromptBuilder
from .ranking import build_ranking
from .screening import Screen
from .settings import (
    check_explain,
    check_settings,
    check_strategy,
    check_window,
    choose_calibration,
    choose_head_set,
    choose_heads,
    choose_screen,
    choose_window,
    screen_of_call,
)
from .types import DocId, Document, Explain, Ranking, Screening

if TYPE_CHECKING:
    from hook_runtime.async_engine import AsyncHookLLM
    from hook_runtime.engine import HookLLM

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
        screen: Screening = False,
        screen_heads: InjectionHeads | str | os.PathLike[str] | None = None,
        extra_heads: Iterable[object] = (),
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
            extra_heads: heads that the engine holds from the start, and loads layers for, beside
                those that are read here: for an `InjectionDetector` on ``reranker.backend``. A
                running ``backend`` must have them.
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
        self._extra_heads = tuple(Head.parse(head) for head in extra_heads)
        self._closed = False
        self._open = self._open_backend(backend, resolved, engine)
        try:
            if self._head_set is not None and self._heads is not None:
                self._head_set.check(self._open.model, self._open.model_id)
            self._open.model.check_heads((*(self._heads or ()), *self._extra_heads))
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

    @classmethod
    def from_llm(cls, llm: HookLLM | AsyncHookLLM | CaptureBackend, **settings: Any) -> Reranker:
        """A reranker on an engine that somebody runs to generate: one model ranks and answers.

        The engine stays its owner's to close. Rank with ``arerank`` on the event loop of an
        `AsyncHookLLM`, with ``rerank`` too in other threads. ``settings`` are those of `Reranker`
        but for the model and the engine. Heads that were not named when the engine started
        (``HookLLM(heads=...)``) are held from the first ranking on, memory permitting.

        Raises:
            TypeError: ``llm`` is no running engine. Others are those of `Reranker`.
        """
        from hook_runtime.async_engine import AsyncHookLLM
        from hook_runtime.bridged import BridgedHookLLM

        if isinstance(llm, str):
            raise TypeError(f"from_llm takes a running HookLLM or AsyncHookLLM, not {llm!r}.")
        backend = BridgedHookLLM(llm) if isinstance(llm, AsyncHookLLM) else llm
        return cls(backend=backend, **settings)

    @property
    def backend(self) -> CaptureBackend:
        """What attention is read from."""
        return self._open.backend

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
        """Those of the ranking, of the screen and of others who read on the engine."""
        if self._heads is None:
            return None
        screening = () if self._screen is None else self._screen.heads.heads
        return tuple(dict.fromkeys((*self._heads, *screening, *self._extra_heads)))

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
        explain: Explain = False,
        max_tokens_per_doc: int | None = None,
        screen: Screening | None = None,
    ) -> Ranking:
        """Rank ``documents``, best first; all of them unless ``top_n`` says fewer.

        Args:
            query: what is looked for.
            documents: strings or `Document`s, in any iterable; never changed.
            doc_ids: one for each, all different; instead of the documents' own.
            top_n: how many to return, from 1.
            explain: give every document's `TokenScore`s; "heads" gives them by head too, which
                needs heads times tokens numbers a document.
            max_tokens_per_doc: cut documents shorter than the reranker does; never longer.
            screen: instead of the reranker's own, which must not be False unless this is.

        Raises:
            TypeError: the query is no string, or a document is neither a string nor a Document.
            ValueError: a blank query; ``top_n`` below 1; an unknown ``explain``; no screen to use;
                ids too few, too many or equal; or a PromptError: the query or the window does not
                fit the model.
            NotFiniteError: the engine returned NaN; names the document.
            ClosedError: after ``close()``.
        """
        self._check_open()
        given = check_input(query, documents, doc_ids, max_tokens_per_doc)
        how = screen_of_call(screen, self._screen)
        return self._rerank([given], check_top_n(top_n), explain, how)[0]

    async def arerank(
        self,
        query: str,
        documents: Documents,
        *,
        doc_ids: Iterable[DocId] | None = None,
        top_n: int | None = None,
        explain: Explain = False,
        max_tokens_per_doc: int | None = None,
        screen: Screening | None = None,
    ) -> Ranking:
        """As ``rerank``, leaving the event loop free meanwhile.

        With ``backend="vllm-async"``, calls that run at the same time share the engine's batches,
        and cancelling one frees what it had in the engine; with other backends they take turns
        in threads.
        """
        self._check_open()
        given = [check_input(query, documents, doc_ids, max_tokens_per_doc)]
        top_n = check_top_n(top_n)
        by_head = check_explain(explain) == "heads"
        how = screen_of_call(screen, self._screen)
        plans = await asyncio.to_thread(self._plan_all, given, by_head, how)
        unread = self._reader.unread(plans)
        captures = await self._open.acapture(list(unread.values()))
        attention = self._reader.attention(plans, unread, captures)
        heads = self._reader.by_head(plans, unread, captures) if by_head else None
        rankings = await asyncio.to_thread(
            self._rank_all, given, plans, attention, top_n, bool(explain), heads, how
        )
        return rankings[0]

    def rerank_batch(
        self,
        tasks: Iterable[tuple[str, Documents]],
        *,
        top_n: int | None = None,
        explain: Explain = False,
        progress: bool = False,
    ) -> list[Ranking]:
        """Rank each (query, documents) of ``tasks``, all in one engine batch; in their order.

        ``progress`` shows the engine's progress; the rest is as in ``rerank``, whose errors here
        carry a note with the number of the task.
        """
        self._check_open()
        given = check_tasks(tasks)
        return self._rerank(given, check_top_n(top_n), explain, self._screen, progress)

    def answer_prompt(
        self,
        query: str,
        documents: Documents,
        *,
        relevant: Iterable[int] = (),
        room: int = 256,
        max_tokens_per_doc: int | None = None,
    ) -> dict[str, Any]:
        """A prompt for ``HookLLM.generate`` that asks for an answer from ``documents``.

        The documents come first, in the order given, written as they are for ranking; the question
        comes last. So the engine re-uses what ranking computed as far as both prompts agree, in
        whole blocks of its prefix cache: with ``window="all"`` all documents, if they are the same
        ones in the same order; with ``window=1`` only the first, which then should be the best.
        Nothing else can be re-used: a token's key depends on all that comes before it. Captures
        have a prefix cache of their own, whose salt the prompt carries for now: make it when it is
        needed. With ``data_parallel_size`` above 1 vLLM may send it to an engine that ranked
        something else.

        Args:
            query: the question.
            documents: those to answer from.
            relevant: indices of documents to point out, such as ``[r.index for r in ranking[:3]]``.
            room: tokens that an answer may have; documents that leave fewer are cut.
            max_tokens_per_doc: as in the ranking.

        Returns:
            ``{"prompt_token_ids": [...], "cache_salt": ...}``.

        Raises:
            TypeError: the backend does not generate, or as ``rerank``.
            ValueError: an index out of range, no text at all, or as ``rerank``.
            PromptError: the documents do not fit.
        """
        self._check_open()
        given = check_input(query, documents, None, max_tokens_per_doc)
        return answer_prompt(given, list(relevant), room, self._reader.builder, self.backend)

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
        explain: Explain,
        screen: Screen | None,
        progress: bool = False,
    ) -> list[Ranking]:
        by_head = check_explain(explain) == "heads"
        plans = self._plan_all(inputs, by_head, screen)
        unread = self._reader.unread(plans)
        captures = self._open.capture(list(unread.values()), progress=progress)
        attention = self._reader.attention(plans, unread, captures)
        heads = self._reader.by_head(plans, unread, captures) if by_head else None
        return self._rank_all(inputs, plans, attention, top_n, bool(explain), heads, screen)

    def _plan_all(
        self, inputs: Sequence[RerankInput], by_head: bool, screen: Screen | None
    ) -> list[Plan]:
        plans = []
        for number, given in enumerate(inputs):
            with naming_task(number, of=len(inputs)):
                plans.append(self._reader.plan(given, by_head, screen is not None))
        return plans

    def _rank_all(
        self,
        inputs: Sequence[RerankInput],
        plans: Sequence[Plan],
        attention: Attention,
        top_n: int | None,
        explain: bool,
        heads: Mapping[bytes, HeadAttention] | None,
        screen: Screen | None,
    ) -> list[Ranking]:
        scored = []
        for number, (given, plan) in enumerate(zip(inputs, plans, strict=True)):
            with naming_task(number, of=len(inputs)):
                scored.append(self._reader.score(given, plan, attention, heads))
        return [
            build_ranking(
                given,
                documents,
                model=self.model_id,
                strategy=self.strategy,
                top_n=top_n,
                explain=explain,
                by_head=heads is not None,
                prompt_tokens=sum(len(reading.query.request.prompt_token_ids) for reading in plan),
                screen=screen,
            )
            for given, plan, documents in zip(inputs, plans, scored, strict=True)
        ]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this Reranker for {self.model_id} was closed: create a new one.")
