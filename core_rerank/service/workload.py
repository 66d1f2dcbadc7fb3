"""Runs requests on the engine: turns, deadlines, callers that leave, an engine that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from core_rerank.errors import ClosedError, NotFiniteError, PromptError
from hook_runtime.errors import EngineDeadError, HookRuntimeError

from .admission import Admission
from .errors import (
    ClientGone,
    DeadlineExceeded,
    InferenceFailed,
    Invalid,
    QueueFull,
    ServiceError,
    Unavailable,
)
from .metrics import Metrics
from .settings import ServiceSettings

if TYPE_CHECKING:
    from core_rerank.reranker import Reranker
    from core_rerank.types import Document, Explain, Ranking, Screening

T = TypeVar("T")

RUNNING_SHARED = 32
"""Requests at a time in an engine whose callers share its batches; elsewhere they take turns."""

_DROPPED = {
    QueueFull: "queue_full",
    DeadlineExceeded: "deadline",
    ClientGone: "client_gone",
    Unavailable: "unavailable",
}
"""Why work was dropped or never begun, as the metric names it."""


@dataclass(frozen=True, slots=True)
class RankTask:
    """One query and its documents."""

    query: str
    documents: Sequence[str | Document]
    top_n: int | None = None
    explain: Explain = False
    max_tokens_per_doc: int | None = None
    screen: Screening = False


class Workload:
    """All the work of one service on one reranker. Use from one event loop."""

    def __init__(self, reranker: Reranker, settings: ServiceSettings, metrics: Metrics) -> None:
        self.reranker = reranker
        self._metrics = metrics
        shared = RUNNING_SHARED if reranker.shares_batches else 1
        self.max_running = settings.max_running or shared
        self._admission = Admission(self.max_running, settings.max_waiting)
        self._ended: Unavailable | None = None
        self._no_more_time = asyncio.Event()
        metrics.watch("running_requests", "Requests in the engine.", lambda: self.running)
        metrics.watch("waiting_requests", "Requests in the queue.", lambda: self.waiting)
        metrics.watch("ready", "1 where requests are taken.", lambda: float(self.ended is None))

    @property
    def running(self) -> int:
        """Requests that are in the engine."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._admission.waiting

    @property
    def ended(self) -> Unavailable | None:
        """Why no request is taken any more, or None."""
        return self._ended

    def stop_taking(self, why: str) -> None:
        """Refuse new requests from now on; those that were taken go on."""
        if self._ended is None:
            self._ended = Unavailable(why, retry_after_s=10)

    def drop_taken(self) -> None:
        """Answer those that were taken with 503: the time to end them is over."""
        self._no_more_time.set()

    def check_engine(self) -> bool:
        """Whether the engine lives; if not, no request is taken any more."""
        try:
            self.reranker.check_health()
        except (EngineDeadError, ClosedError) as error:
            self.stop_taking(f"the engine is gone: {error}")
            return False
        return True

    async def run(
        self,
        tasks: Sequence[RankTask],
        *,
        timeout_s: float,
        client_gone: Callable[[], Awaitable[object]],
        priority: int = 0,
    ) -> list[Ranking]:
        """The rankings of ``tasks``, which count as one request; see ``run_work``.

        Of an engine whose callers take turns the task that runs when it is dropped still ends.
        """

        async def rank(dropped: asyncio.Event) -> list[Ranking]:
            return await self._rank_all(tasks, dropped)

        return await self.run_work(
            rank, timeout_s=timeout_s, client_gone=client_gone, priority=priority
        )

    async def run_work(
        self,
        do: Callable[[asyncio.Event], Awaitable[T]],
        *,
        timeout_s: float,
        client_gone: Callable[[], Awaitable[object]],
        priority: int = 0,
        begun: asyncio.Event | None = None,
        long: bool = False,
    ) -> T:
        """What ``do`` returns once it has had its turn; it is given what is set when it is dropped.

        It is dropped when ``timeout_s`` is over, ``client_gone()`` ends, or `drop_taken` is called;
        after ``begun`` is set, as where an answer is sent piece by piece, time has no limit. Work
        that is ``long`` leaves some turns to the rest.

        Raises:
            ServiceError: refused, too late, nobody there any more, a query that does not fit, a
                service that stops, or a failure of the engine.
        """
        if self._ended is not None:
            self._count(self._ended)
            raise self._ended
        work = asyncio.ensure_future(self._in_turn(do, priority, long))
        gone = asyncio.ensure_future(client_gone())
        stopped = asyncio.ensure_future(self._no_more_time.wait())
        everything = (work, gone, stopped)
        first = asyncio.FIRST_COMPLETED
        try:
            done, _ = await asyncio.wait(everything, timeout=timeout_s, return_when=first)
            if not done and begun is not None and begun.is_set():
                await asyncio.wait(everything, return_when=first)
            if work.done():
                return work.result()
            if gone.done():
                raise ClientGone("the caller closed the connection.")
            if stopped.done():
                raise Unavailable(
                    "the service stopped before this request was done: send it again.",
                    retry_after_s=10,
                )
            raise DeadlineExceeded(
                f"no answer within {timeout_s:g} s, waiting included: send fewer documents, or "
                "come back later.",
                retry_after_s=self._admission.wait_estimate_s(),
            )
        except ServiceError as error:
            self._count(error)
            raise
        finally:
            for future in everything:
                future.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _in_turn(
        self, do: Callable[[asyncio.Event], Awaitable[T]], priority: int, long: bool
    ) -> T:
        await self._admission.enter(priority, long=long)
        started = time.perf_counter()
        dropped = asyncio.Event()
        working = asyncio.ensure_future(do(dropped))

        def over(done: asyncio.Future[T]) -> None:
            self._admission.leave(time.perf_counter() - started, long=long)
            if not done.cancelled():
                done.exception()  # a caller who left does not ask for it

        working.add_done_callback(over)
        if self.reranker.shares_batches:
            return await working
        # The task in the thread cannot be stopped: it keeps its turn until it ends.
        try:
            return await asyncio.shield(working)
        finally:
            dropped.set()

    async def _rank_all(self, tasks: Sequence[RankTask], dropped: asyncio.Event) -> list[Ranking]:
        """One task after the other where they do not share batches, and none once ``dropped``."""
        try:
            if self.reranker.shares_batches:
                async with asyncio.TaskGroup() as group:
                    running = [group.create_task(self._rank(task)) for task in tasks]
                return [task.result() for task in running]
            return [await self._rank(task) for task in tasks if not dropped.is_set()]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _rank(self, task: RankTask) -> Ranking:
        with failures_told(self):
            ranking = await self.reranker.arerank(
                task.query,
                task.documents,
                top_n=task.top_n,
                explain=task.explain,
                max_tokens_per_doc=task.max_tokens_per_doc,
                screen=task.screen,
            )
        self._metrics.documents.observe(len(task.documents))
        self._metrics.tokens.inc(ranking.prompt_tokens)
        self._metrics.truncated.inc(sum(item.truncated for item in ranking))
        flagged = len(ranking.dropped) + sum(item.flagged for item in ranking)
        self._metrics.flagged.labels("rerank").inc(flagged)
        return ranking

    def _count(self, error: ServiceError) -> None:
        if type(error) in _DROPPED:
            self._metrics.dropped.labels(_DROPPED[type(error)]).inc()


@contextmanager
def failures_told(workload: Workload, field: str | None = None) -> Iterator[None]:
    """What the engine raises inside as the service's errors; ``field`` is what may not fit."""
    try:
        yield
    except PromptError as error:
        raise Invalid(" ".join([str(error), *_notes(error)]), field=field) from error
    except (EngineDeadError, ClosedError) as error:
        workload.stop_taking(f"the engine is gone: {error}")
        raise Unavailable(str(error), retry_after_s=10) from error
    except (NotFiniteError, HookRuntimeError) as error:
        raise InferenceFailed(str(error)) from error


def _notes(error: PromptError) -> list[str]:
    return [f"({note})" for note in getattr(error, "__notes__", [])]
