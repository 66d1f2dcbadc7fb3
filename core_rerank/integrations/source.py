"""Where an adapter's rankings come from: an engine of this process, or a rerank server."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from core_rerank.errors import MissingDependencyError, RemoteError
from core_rerank.inputs import check_input, check_top_n
from core_rerank.reranker import DEFAULT_MODEL, Reranker
from core_rerank.settings import check_screening
from core_rerank.shared import arerank, rerank
from core_rerank.types import Ranking, Screening

if TYPE_CHECKING:
    import httpx

DEFAULT_BACKEND = "vllm-async"
DEFAULT_TIMEOUT_S = 60.0
_OF_A_CALL = ("model", "query", "documents", "doc_ids", "top_n", "explain")
"""What `core_rerank.rerank` takes besides the settings of an engine."""


class Scored(NamedTuple):
    """A text's place in the list that was ranked, its score, and what a screen says of it."""

    index: int
    score: float
    injection: float | None = None
    flagged: bool = False


class Source(Protocol):
    """Ranks texts, best first."""

    @property
    def model_name(self) -> str:
        """What ranks, for logs and events."""
        ...

    def rank(self, query: str, texts: Sequence[str], top_n: int | None = None) -> list[Scored]:
        """All texts, or the best ``top_n``."""
        ...

    async def arank(
        self, query: str, texts: Sequence[str], top_n: int | None = None
    ) -> list[Scored]:
        """As ``rank``, leaving the event loop free meanwhile."""
        ...


def open_source(
    *,
    model: str | None = None,
    reranker: Reranker | None = None,
    base_url: str | None = None,
    api_key: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    settings: Mapping[str, Any] | None = None,
) -> Source:
    """The source that an adapter's arguments describe; loads nothing yet.

    Args:
        model: an alias, a Hugging Face id or a local folder; by default the embedded one, or
            whatever the server serves.
        reranker: a running one, which stays the caller's to close.
        base_url: of a server that speaks Jina's or our ``/v1/rerank``.
        api_key: for the server.
        timeout_s: seconds to wait for the server.
        settings: further arguments of `Reranker`; engines are shared with `core_rerank.rerank`. A
            server takes ``screen`` alone.

    Raises:
        ValueError: more than one of these says where to rank, a server is given settings, or a
            setting is none of `Reranker`'s.
    """
    settings = {name: value for name, value in (settings or {}).items() if value is not None}
    if wrong := [name for name in _OF_A_CALL if name in settings]:
        raise ValueError(
            f"settings may not hold {', '.join(wrong)}: they are arguments of core_rerank.Reranker "
            "such as dtype; the model is an argument of its own, the others belong to a call."
        )
    if reranker is not None:
        if base_url is not None or model is not None or settings:
            raise ValueError(
                "a running reranker has its own model and settings: leave out model, base_url, "
                "window, strategy and settings."
            )
        return RunningSource(reranker)
    if base_url is not None:
        screen = check_screening(settings.pop("screen", False))
        if settings:
            raise ValueError(
                f"the server at base_url has its own settings: leave out {', '.join(settings)}."
            )
        return RemoteSource(base_url, model, api_key, timeout_s, screen)
    return LocalSource(model or DEFAULT_MODEL, {"backend": DEFAULT_BACKEND, **settings})


class RunningSource:
    """A reranker that somebody else opened and will close."""

    def __init__(self, reranker: Reranker) -> None:
        self._reranker = reranker

    def __deepcopy__(self, memo: object) -> RunningSource:
        """The same: a copy of an adapter ranks with the same reranker."""
        return self

    @property
    def model_name(self) -> str:
        """The id of the model."""
        return self._reranker.model_id

    def rank(self, query: str, texts: Sequence[str], top_n: int | None = None) -> list[Scored]:
        """See `Source`."""
        return _scored(self._reranker.rerank(query, texts, top_n=top_n))

    async def arank(
        self, query: str, texts: Sequence[str], top_n: int | None = None
    ) -> list[Scored]:
        """See `Source`."""
        return _scored(await self._reranker.arerank(query, texts, top_n=top_n))


class LocalSource:
    """An engine of this process, started at the first call and kept for all who want the same."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        self.model_name = model
        self._settings = dict(settings)

    def rank(self, query: str, texts: Sequence[str], top_n: int | None = None) -> list[Scored]:
        """See `Source`."""
        return _scored(rerank(query, texts, self.model_name, top_n=top_n, **self._settings))

    async def arank(
        self, query: str, texts: Sequence[str], top_n: int | None = None
    ) -> list[Scored]:
        """See `Source`."""
        ranking = await arerank(query, texts, self.model_name, top_n=top_n, **self._settings)
        return _scored(ranking)


class RemoteSource:
    """A server that answers ``POST /v1/rerank``: ``core-rerank serve``, or another like Jina's."""

    def __init__(
        self,
        base_url: str,
        model: str | None,
        api_key: str | None,
        timeout_s: float,
        screen: Screening = False,
    ) -> None:
        """``screen`` needs `core-rerank serve --screen`. MissingDependencyError without httpx."""
        _httpx()
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1/rerank"
        self._model = model
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._screen = screen

    @property
    def model_name(self) -> str:
        """The model asked for, or the server's address."""
        return self._model or self._url

    def rank(self, query: str, texts: Sequence[str], top_n: int | None = None) -> list[Scored]:
        """See `Source`. RemoteError where the server cannot be reached or refuses."""
        body = self._body(query, texts, top_n)
        httpx = _httpx()
        try:
            with httpx.Client(**self._options()) as client:
                response = client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._read(response, len(texts), top_n)

    async def arank(
        self, query: str, texts: Sequence[str], top_n: int | None = None
    ) -> list[Scored]:
        """See `Source`. RemoteError where the server cannot be reached or refuses."""
        body = self._body(query, texts, top_n)
        httpx = _httpx()
        try:
            async with httpx.AsyncClient(**self._options()) as client:
                response = await client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._read(response, len(texts), top_n)

    @property
    def _like(self) -> str:
        return "core-rerank serve --screen" if self._screen else "Jina"

    def _options(self) -> dict[str, Any]:
        return {"headers": self._headers, "timeout": self._timeout_s, "verify": _tls()}

    def _body(self, query: str, texts: Sequence[str], top_n: int | None) -> dict[str, Any]:
        given = check_input(query, texts)
        body: dict[str, Any] = {
            "query": given.query,
            "documents": [document.text for document in given.documents],
            "return_documents": False,
            "raw_scores": True,
        }
        if (top_n := check_top_n(top_n)) is not None:
            body["top_n"] = top_n
        if self._model is not None:
            body["model"] = self._model
        if self._screen:
            body["screen"] = self._screen
        return body

    def _scored(self, item: Mapping[str, Any]) -> Scored:
        index, score = int(item["index"]), float(item["relevance_score"])
        if not self._screen:
            return Scored(index, score)
        injection, flagged = item.get("injection"), item["flagged"]  # blank ones have no score
        if not isinstance(flagged, bool):
            raise TypeError(f"flagged is {flagged!r}")
        return Scored(index, score, None if injection is None else float(injection), flagged)

    def _unreachable(self, error: Exception) -> RemoteError:
        return RemoteError(
            f"{self._url} did not answer ({type(error).__name__}: {error}): check base_url, and "
            "that the server runs; a slow one needs a larger timeout_s."
        )

    def _read(self, response: httpx.Response, count: int, top_n: int | None) -> list[Scored]:
        """The best ``top_n`` of ``count`` texts; some servers answer all whatever was asked."""
        if response.status_code != 200:
            raise RemoteError(
                f"{self._url} answered {response.status_code}: {_told(response)}",
                response.status_code,
            )
        try:
            answer = response.json()
            found = [self._scored(item) for item in answer["results"]]
            dropped = {int(index) for index in answer["dropped"]} if self._screen else set()
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise RemoteError(
                f"{self._url} answered no ranking ({error!r}): base_url must be that of a server "
                f"that answers /v1/rerank as {self._like} does.",
                200,
            ) from error
        places = [item.index for item in found]
        if len({*places, *dropped} & set(range(count))) != len(places) + len(dropped):
            raise RemoteError(f"{self._url} ranked documents that were not sent, or twice.", 200)
        for index, *numbers, _ in found:
            for number in numbers:
                if number is not None and not math.isfinite(number):
                    raise RemoteError(
                        f"{self._url} scored document {index} {number}, which is no finite number.",
                        200,
                    )
        left = count - len(dropped)
        wanted = left if top_n is None else min(top_n, left)
        if len(found) < wanted:
            raise RemoteError(
                f"{self._url} ranked {len(found)} documents where {wanted} were asked for, of "
                f"{count} sent.",
                200,
            )
        return sorted(found, key=lambda item: -item.score)[:wanted]


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingDependencyError(
            f"ranking on a server needs httpx ({error}). To install it: pip install httpx."
        ) from None
    return httpx


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    """Made once: reading the certificates takes longer than a short request."""
    return ssl.create_default_context()


def _told(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    if isinstance(body, dict):
        for name in ("message", "detail", "error"):
            if isinstance(body.get(name), str):
                return body[name]
    return response.text[:200]


def _scored(ranking: Ranking) -> list[Scored]:
    return [Scored(d.index, d.score, d.injection, d.flagged) for d in ranking]
