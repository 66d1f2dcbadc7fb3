"""CoreRerank in LlamaIndex: contract, events, copies, remote, and whole pipelines."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, SharedFakeBackend, shared_tokens
from services import DOCUMENTS, QUERY, behind_socket, fake_reranker

from core_rerank import InjectionHeads, MissingDependencyError, Reranker
from core_rerank.errors import RemoteError
from hook_runtime.specs import CaptureRequest, Head

pytest.importorskip("llama_index.core")

from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler
from llama_index.core.instrumentation import (
    get_dispatcher,  # pyright: ignore[reportPrivateImportUsage]
)
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import ImageNode, MetadataMode, NodeWithScore, QueryBundle, TextNode

from core_rerank.integrations.llama_index import CoreRerank


@pytest.fixture
def rerank(reranker: Reranker) -> CoreRerank:
    return CoreRerank(reranker, top_n=3)


def nodes() -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(
                text=text,
                id_=f"n{i}",
                metadata={"page": i, "secret": "x"},
                excluded_embed_metadata_keys=["secret"],
            ),
            score=None if i == 2 else 0.1 * i,
        )
        for i, text in enumerate(DOCUMENTS)
    ]


class Events(BaseEventHandler):
    """Names of the rerank events, in order."""

    names: list[str] = []  # noqa: RUF012

    @classmethod
    def class_name(cls) -> str:
        return "Events"

    def handle(self, event: Any, **_: Any) -> None:
        if "ReRank" in event.class_name():
            self.names.append(event.class_name())


@pytest.fixture
def events() -> Iterator[list[str]]:
    handler = Events(names=[])
    root = get_dispatcher()
    root.add_event_handler(handler)
    yield handler.names
    root.event_handlers.remove(handler)


def test_it_gives_new_nodes_best_first(rerank: CoreRerank, reranker: Reranker) -> None:
    given = nodes()
    before = copy.deepcopy(given)
    found = rerank.postprocess_nodes(given, query_str=QUERY)
    texts = [item.node.get_content(metadata_mode=MetadataMode.EMBED) for item in given]
    assert "page: 0" in texts[0]
    assert "secret" not in texts[0]
    expected = reranker.rerank(QUERY, texts, top_n=3)
    assert [(n.node.node_id, n.score) for n in found] == [
        (f"n{item.index}", item.score) for item in expected
    ]
    assert all(type(item.score) is float for item in found)
    assert given == before
    assert not {id(item) for item in found} & {id(item) for item in given}
    assert [n.node for n in found] == [given[item.index].node for item in expected]


def test_the_text_alone_may_be_ranked(reranker: Reranker) -> None:
    rerank = CoreRerank(reranker, top_n=9, metadata_mode=MetadataMode.NONE)
    found = rerank.postprocess_nodes(nodes(), QueryBundle(QUERY))
    expected = reranker.rerank(QUERY, DOCUMENTS)
    assert [item.score for item in found] == [item.score for item in expected]


def test_the_retrieval_score_is_kept_where_no_model_reads_it(reranker: Reranker) -> None:
    rerank = CoreRerank(reranker, top_n=4, keep_retrieval_score=True)
    given = nodes()
    before = copy.deepcopy(given)
    found = rerank.postprocess_nodes(given, query_str=QUERY)
    assert {n.node.node_id: n.node.metadata["retrieval_score"] for n in found} == {
        item.node.node_id: item.score for item in given
    }
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert "retrieval_score" not in found[0].node.get_content(metadata_mode=mode)
    assert given == before
    again = rerank.postprocess_nodes(found, query_str=QUERY)
    assert [item.score for item in again] == [item.score for item in found]


def test_a_screen_writes_where_no_model_reads_it_or_drops(smollm2_tokenizer: Any) -> None:
    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        if request.probe.reduction == "tokens":
            return shared_tokens(request, head)
        document = request.prompt_token_ids[slice(*request.probe.spans[0])]
        return np.array([0.3 if bread in document else 0.1, 0.1])

    bread = smollm2_tokenizer.encode(" bread")[0]
    heads = InjectionHeads.model_validate(
        {
            "model": "test/fake",
            "num_layers": 4,
            "num_heads": 3,
            "heads": ["1-1"],
            "threshold": 0.6,
            "method": "k-sigma",
            "task": "document",
        }
    )
    backend = FakeBackend(smollm2_tokenizer, attention=attention)

    def screened(screen: str) -> list[NodeWithScore]:
        reranker = Reranker(
            backend=backend, heads=["1-2"], window=1, screen=screen, screen_heads=heads
        )
        rerank = CoreRerank(reranker, top_n=4)
        assert rerank.screen == screen
        return rerank.postprocess_nodes(nodes(), query_str=QUERY)

    flagged = screened("flag")
    assert {n.node.node_id: n.node.metadata["injection_flagged"] for n in flagged} == {
        f"n{i}": i == 0 for i in range(4)
    }
    scores = [n.node.metadata["injection_score"] for n in flagged if n.node.node_id == "n0"]
    assert scores == pytest.approx([0.75])
    for mode in (MetadataMode.LLM, MetadataMode.EMBED):
        assert "injection" not in flagged[0].node.get_content(metadata_mode=mode)
    kept = [n.node.node_id for n in flagged if n.node.node_id != "n0"]
    assert [n.node.node_id for n in screened("drop")] == kept
    reranker = Reranker(backend=backend, heads=["1-2"], window=1, screen=True, screen_heads=heads)
    with behind_socket(reranker) as running:
        for screen in ("flag", "drop"):
            remote = CoreRerank(base_url=running.url, top_n=4, screen=screen)
            assert remote.postprocess_nodes(nodes(), query_str=QUERY) == screened(screen)


def test_types_of_nodes_are_kept(rerank: CoreRerank) -> None:
    image = NodeWithScore(node=ImageNode(text="tides", image_url="http://x/y.png"), score=1.0)
    kept = CoreRerank(rerank._source._reranker, keep_retrieval_score=True)  # type: ignore[union-attr]
    for one in (rerank, kept):
        (found,) = one.postprocess_nodes([image], query_str=QUERY)
        assert type(found.node) is ImageNode
        assert found.node.image_url == "http://x/y.png"


def test_no_nodes_no_query(rerank: CoreRerank, events: list[str]) -> None:
    assert rerank.postprocess_nodes([], query_str=QUERY) == []
    assert asyncio.run(rerank.apostprocess_nodes([], query_str=QUERY)) == []
    with pytest.raises(ValueError, match="Missing query bundle"):
        rerank.postprocess_nodes(nodes())
    with pytest.raises(ValueError, match="query is blank"):
        rerank.postprocess_nodes(nodes(), query_str=" ")
    assert events.count("ReRankStartEvent") == events.count("ReRankEndEvent")


def test_events_are_balanced_also_when_it_fails(smollm2_tokenizer: Any, events: list[str]) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer)
    debug = LlamaDebugHandler(print_trace_on_end=False)
    rerank = CoreRerank(reranker, top_n=1, callback_manager=CallbackManager([debug]))
    rerank.postprocess_nodes(nodes(), query_str=QUERY)
    asyncio.run(rerank.apostprocess_nodes(nodes(), query_str=QUERY))
    (start, end), _ = debug.get_event_pairs(CBEventType.RERANKING)
    assert start.payload is not None
    assert end.payload is not None
    assert start.payload["model_name"] == "test/fake"
    assert start.payload["top_k"] == 1
    assert len(end.payload["nodes"]) == 1
    backend.dead = True
    with pytest.raises(Exception, match="died"):
        asyncio.run(rerank.apostprocess_nodes(nodes(), query_str=QUERY))
    assert len(debug.get_event_pairs(CBEventType.RERANKING)) == 3
    assert all(len(pair) == 2 for pair in debug.get_event_pairs(CBEventType.RERANKING))
    assert events == ["ReRankStartEvent", "ReRankEndEvent"] * 3


def test_async_keeps_the_loop_free_and_shares_batches(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=0.3)
    rerank = CoreRerank(reranker, top_n=2)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def everything() -> Any:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        started = asyncio.get_running_loop().time()
        found = await asyncio.gather(
            *(rerank.apostprocess_nodes(nodes(), query_str=QUERY) for _ in range(8))
        )
        seconds = asyncio.get_running_loop().time() - started
        ticking.cancel()
        return found, seconds

    found, seconds = asyncio.run(everything())
    assert seconds < 8 * 0.3
    assert ticks > 10
    assert backend.started == 8
    want = [(n.node_id, n.score) for n in rerank.postprocess_nodes(nodes(), query_str=QUERY)]
    assert all([(n.node_id, n.score) for n in one] == want for one in found)


def test_cancelling_frees_the_engine(smollm2_tokenizer: Any) -> None:
    reranker, backend = fake_reranker(smollm2_tokenizer, seconds=30)

    async def leave() -> None:
        async with asyncio.timeout(0.3):
            await CoreRerank(reranker).apostprocess_nodes(nodes(), query_str=QUERY)

    with pytest.raises(TimeoutError):
        asyncio.run(leave())
    assert backend.cancelled == 1


def test_settings_survive_a_round_trip() -> None:
    rerank = CoreRerank(
        model="org/model", top_n=7, window="all", strategy="icr", keep_retrieval_score=True,
        settings={"max_tokens_per_doc": 64}, metadata_mode=MetadataMode.LLM,
    )  # fmt: skip
    data = json.loads(json.dumps(rerank.to_dict()))
    assert data["class_name"] == "CoreRerank"
    again = CoreRerank.from_dict(dict(data))
    assert again.to_dict() == data
    assert (again.top_n, again.window, again.strategy) == (7, "all", "icr")
    remote = CoreRerank(base_url="http://h:1", api_key="hidden", top_n=3)
    assert "hidden" not in remote.to_json() + repr(remote)
    assert CoreRerank.from_json(remote.to_json(), api_key="hidden").api_key == "hidden"


def test_copies_rank_with_the_same_reranker_and_pickles_say_they_cannot(
    rerank: CoreRerank, smollm2_tokenizer: Any
) -> None:
    want = [n.score for n in rerank.postprocess_nodes(nodes(), query_str=QUERY)]
    copied = copy.deepcopy(rerank)
    assert [n.score for n in copied.postprocess_nodes(nodes(), query_str=QUERY)] == want
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(rerank)
    data = rerank.to_dict()
    assert (data["model"], data["window"], data["strategy"]) == ("test/fake", 1, "core")


def test_wrong_settings_are_refused(reranker: Reranker) -> None:
    for wrong in ({"top_n": 0}, {"window": 0}, {"strategy": "best"}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CoreRerank(**wrong)
    with pytest.raises(ValueError, match="leave out window"):
        CoreRerank(base_url="http://h:1", window=1)
    with pytest.raises(ValueError, match="running reranker has its own"):
        CoreRerank(reranker, model="org/model")


@pytest.fixture(scope="module")
def url(reranker: Reranker) -> Iterator[str]:
    with behind_socket(reranker, api_keys=("key",)) as running:
        yield running.url


def test_a_server_gives_what_the_engine_gives(rerank: CoreRerank, url: str) -> None:
    want = [(n.node_id, n.score) for n in rerank.postprocess_nodes(nodes(), query_str=QUERY)]
    for base_url in (url, f"{url}/", f"{url}/v1"):
        remote = CoreRerank(base_url=base_url, api_key="key", top_n=3)
        copied = pickle.loads(pickle.dumps(remote))
        for one in (remote, copied, copy.deepcopy(remote)):
            found = one.postprocess_nodes(nodes(), query_str=QUERY)
            assert [(n.node_id, n.score) for n in found] == want
        found = asyncio.run(remote.apostprocess_nodes(nodes(), query_str=QUERY))
        assert [(n.node_id, n.score) for n in found] == want


def test_a_server_that_refuses_is_an_error_and_no_silent_order(url: str) -> None:
    with pytest.raises(RemoteError, match="401: this service needs an API key") as refused:
        CoreRerank(base_url=url).postprocess_nodes(nodes(), query_str=QUERY)
    assert refused.value.status == 401
    other = CoreRerank(base_url=url, api_key="key", model="other")
    with pytest.raises(RemoteError, match="'other' is not served"):
        asyncio.run(other.apostprocess_nodes(nodes(), query_str=QUERY))
    nobody = CoreRerank(base_url="http://127.0.0.1:9", timeout_s=2)
    with pytest.raises(RemoteError, match="did not answer"):
        nobody.postprocess_nodes(nodes(), query_str=QUERY)


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "{}",
        '{"results": [{"index": 0}]}',
        '{"results": [{"index": 4, "relevance_score": 1}]}',
        '{"results": [{"index": 0, "relevance_score": 1}, {"index": 0, "relevance_score": 1}]}',
        "no json",
    ],
)
def test_an_answer_that_is_no_ranking(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx

    def post(self: Any, url: str, json: Any) -> httpx.Response:
        return httpx.Response(200, text=answer)

    monkeypatch.setattr(httpx.Client, "post", post)
    with pytest.raises(RemoteError):
        CoreRerank(base_url="http://h").postprocess_nodes(nodes(), query_str=QUERY)


def test_a_local_engine_is_started_once_and_shared(
    smollm2_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two postprocessors of one model, sync and async, and the function ``rerank``: one engine."""
    from core_rerank import pool, shared
    from core_rerank.backends import OpenBackend

    made: list[SharedFakeBackend] = []

    def open_backend(backend: str, resolved: Any, heads: Any, engine: Any) -> OpenBackend:
        assert backend == "vllm-async"
        made.append(SharedFakeBackend(smollm2_tokenizer, name="test/fake"))
        return OpenBackend(made[-1], made[-1].model, "test/fake", made[-1].close)

    monkeypatch.setattr(pool, "open_backend", open_backend)
    monkeypatch.setattr(shared, "_pool", pool.BackendPool())
    monkeypatch.setattr(shared, "_slots", {})
    settings = {"heads": ["1-2", "0-1"]}
    one = CoreRerank(settings=settings, top_n=2)
    two = CoreRerank(settings=settings, window=1)
    assert not made
    first = one.postprocess_nodes(nodes(), query_str=QUERY)
    assert len(asyncio.run(two.apostprocess_nodes(nodes(), query_str=QUERY))) == 2
    shared.rerank(QUERY, DOCUMENTS, backend="vllm-async", **settings)
    assert len(made) == 1
    made[0].dead = True  # a dead engine is let go of, and the next call starts another
    for _ in range(2):
        with pytest.raises(Exception, match=r"died|closed"):
            asyncio.run(one.apostprocess_nodes(nodes(), query_str=QUERY))
        if made[0].closed:
            break
    again = asyncio.run(one.apostprocess_nodes(nodes(), query_str=QUERY))
    assert [n.score for n in again] == [n.score for n in first]
    assert len(made) == 2


def test_a_whole_pipeline(reranker: Reranker) -> None:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.llms import MockLLM

    index = VectorStoreIndex(
        [item.node for item in nodes()], embed_model=MockEmbedding(embed_dim=8)
    )
    engine = index.as_query_engine(
        llm=MockLLM(),
        similarity_top_k=4,
        node_postprocessors=[CoreRerank(reranker, top_n=2, metadata_mode=MetadataMode.NONE)],
    )
    expected = [DOCUMENTS[item.index] for item in reranker.rerank(QUERY, DOCUMENTS, top_n=2)]
    for response in (engine.query(QUERY), asyncio.run(engine.aquery(QUERY))):
        assert [n.node.get_content() for n in response.source_nodes] == expected
        said = str(response)  # MockLLM repeats its prompt
        assert said.index(expected[0]) < said.index(expected[1])
        assert DOCUMENTS[0] not in said


def test_behind_a_fusion_of_our_retrievers(reranker: Reranker) -> None:
    from llama_index.core.llms import MockLLM
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import QueryFusionRetriever

    from core_rerank import Document
    from core_rerank.retrievers import BM25Retriever, as_llama_index

    corpus = {f"n{i}": Document(text, f"n{i}") for i, text in enumerate(DOCUMENTS)}
    bm25 = BM25Retriever()
    bm25.index(corpus)
    fusion = QueryFusionRetriever(
        [as_llama_index(bm25, corpus), as_llama_index(bm25, corpus, top_k=2)],
        llm=MockLLM(), mode="reciprocal_rerank", num_queries=1, similarity_top_k=4, use_async=False,
    )  # fmt: skip
    engine = RetrieverQueryEngine.from_args(
        fusion, llm=MockLLM(), node_postprocessors=[CoreRerank(reranker, top_n=1)]
    )
    (found,) = engine.query(QUERY).source_nodes
    retrieved = [item.node.get_content() for item in fusion.retrieve(QUERY)]
    best = reranker.rerank(QUERY, retrieved, top_n=1)[0]
    assert (found.node.get_content(), found.score) == (retrieved[best.index], best.score)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "core_rerank.integrations.llama_index"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llama_index.core.bridge.pydantic", None)
    with pytest.raises(MissingDependencyError, match=r"core-rerank\[llama-index\]"):
        __import__(name)
