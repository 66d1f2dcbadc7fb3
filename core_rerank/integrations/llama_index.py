"""CoreRerank: a LlamaIndex node postprocessor, on an engine of this process or on a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from core_rerank.errors import MissingDependencyError
from core_rerank.reranker import Reranker
from core_rerank.settings import check_strategy, check_window

from .source import DEFAULT_TIMEOUT_S, RunningSource, Scored, Source, open_source

try:
    from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator
    from llama_index.core.callbacks import CBEventType, EventPayload
    from llama_index.core.instrumentation import (
        get_dispatcher,  # pyright: ignore[reportPrivateImportUsage]
    )
    from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError as error:
    raise MissingDependencyError(
        f"CoreRerank needs llama-index-core ({error}). "
        "To install it: pip install 'core-rerank[llama-index]'."
    ) from None

dispatcher = get_dispatcher(__name__)

RETRIEVAL_SCORE = "retrieval_score"
INJECTION_SCORE = "injection_score"
INJECTION_FLAGGED = "injection_flagged"


class CoreRerank(BaseNodePostprocessor):
    """Reranks nodes by the attention that the query pays to their text.

    Nodes given are never changed: what comes back are new `NodeWithScore`s around the same nodes,
    best first, each with a score of its own. The async methods leave the event loop free, and
    calls that run at the same time share the engine's batches.

        CoreRerank(top_n=3)                                   # an engine of this process
        CoreRerank(top_n=3, base_url="http://host:8765")      # core-rerank serve

    ``to_dict`` and ``from_dict`` keep every setting but the API key; of a running reranker its
    model, window and strategy.
    """

    model: str | None = Field(
        default=None,
        description="Alias, Hugging Face id or folder; by default the embedded model, or whatever "
        "the server at base_url serves.",
    )
    top_n: int = Field(default=2, ge=1, description="How many nodes to return.")
    window: int | Literal["all"] | None = Field(
        default=None, description="Documents in one prompt; by default what the model's heads want."
    )
    strategy: str | None = Field(default=None, description="core (default), icr or qr.")
    keep_retrieval_score: bool = Field(
        default=False,
        description=f"Keep a node's score in its metadata as {RETRIEVAL_SCORE!r}, which neither "
        "the LLM nor the embedding sees.",
    )
    screen: Literal["flag", "drop"] | None = Field(
        default=None,
        description="Score nodes for orders planted in them: flag writes "
        f"{INJECTION_SCORE!r} and {INJECTION_FLAGGED!r} into their metadata, which neither the LLM "
        "nor the embedding sees; drop leaves suspicious nodes out too.",
    )
    metadata_mode: MetadataMode = Field(
        default=MetadataMode.EMBED, description="Which metadata is ranked with the text."
    )
    base_url: str | None = Field(default=None, description="A rerank server, instead of an engine.")
    timeout_s: float = Field(
        default=DEFAULT_TIMEOUT_S, gt=0, description="Seconds to wait for the server."
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of core_rerank.Reranker."
    )
    api_key: str | None = Field(
        default=None, exclude=True, repr=False, description="For the server."
    )
    _source: Source = PrivateAttr()

    def __init__(self, reranker: Reranker | None = None, **data: Any) -> None:
        """The fields, or a running ``reranker`` that stays the caller's to close.

        Raises:
            ValueError: a setting is wrong, or does not go with ``reranker`` or ``base_url``.
        """
        super().__init__(**data)
        self._source = open_source(
            model=self.model,
            reranker=reranker,
            base_url=self.base_url,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            settings={
                "window": self.window,
                "strategy": self.strategy,
                "screen": self.screen,
                **self.settings,
            },
        )
        if reranker is not None:
            self.model, self.window = reranker.model_id, reranker.window
            self.strategy = reranker.strategy
            if reranker.screen is not None:
                self.screen = "drop" if reranker.screen.drop else "flag"

    def __getstate__(self) -> dict[str, Any]:
        """TypeError for a running reranker: another process could not have it."""
        if isinstance(self._source, RunningSource):
            raise TypeError(
                "a CoreRerank with a running reranker cannot be pickled: create it with a model "
                "or a base_url."
            )
        return super().__getstate__()

    @classmethod
    def class_name(cls) -> str:
        """The name it is saved under."""
        return "CoreRerank"

    @field_validator("window")
    @classmethod
    def _window_is_one(cls, window: Any) -> Any:
        return None if window is None else check_window(window)

    @field_validator("strategy")
    @classmethod
    def _strategy_is_one(cls, strategy: str | None) -> str | None:
        return None if strategy is None else check_strategy(strategy).name

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        if not nodes:
            return []
        with self._told(nodes, query) as ranked:
            ranked += self._chosen(nodes, self._source.rank(query, self._texts(nodes), self.top_n))
        return ranked

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        query = _query(query_bundle)
        if not nodes:
            return []
        with self._told(nodes, query) as ranked:
            found = await self._source.arank(query, self._texts(nodes), self.top_n)
            ranked += self._chosen(nodes, found)
        return ranked

    def _texts(self, nodes: list[NodeWithScore]) -> list[str]:
        return [item.node.get_content(metadata_mode=self.metadata_mode) for item in nodes]

    def _chosen(self, nodes: list[NodeWithScore], found: list[Scored]) -> list[NodeWithScore]:
        return [self._with_score(nodes[one.index], one) for one in found]

    def _with_score(self, given: NodeWithScore, found: Scored) -> NodeWithScore:
        node, told = given.node, dict[str, Any]()
        if self.keep_retrieval_score:
            told[RETRIEVAL_SCORE] = given.score
        if found.injection is not None:
            told |= {INJECTION_SCORE: found.injection, INJECTION_FLAGGED: found.flagged}
        if told:
            node = node.model_copy(
                update={
                    "metadata": {**node.metadata, **told},
                    "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, *told],
                    "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, *told],
                }
            )
        return NodeWithScore(node=node, score=found.score)

    @contextmanager
    def _told(self, nodes: list[NodeWithScore], query: str) -> Iterator[list[NodeWithScore]]:
        """Events around a ranking, each begun and each ended, whatever happens between.

        Yields the list that is to be filled with what is returned.
        """
        name: str = self._source.model_name
        ranked: list[NodeWithScore] = []
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: name,
            EventPayload.QUERY_STR: query,
            EventPayload.TOP_K: self.top_n,
        }
        dispatcher.event(
            ReRankStartEvent(query=query, nodes=nodes, top_n=self.top_n, model_name=name)
        )
        try:
            with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
                yield ranked
                event.on_end(payload={EventPayload.NODES: ranked})
        finally:
            dispatcher.event(ReRankEndEvent(nodes=ranked))


def _query(query_bundle: QueryBundle | None) -> str:
    if query_bundle is None:
        raise ValueError("Missing query bundle: give postprocess_nodes a query_str.")
    return query_bundle.query_str
