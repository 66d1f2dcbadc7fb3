"""LangChain, Haystack, sentence-transformers, BEIR and rerankers: each against the real library."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from services import DOCUMENTS, QUERY, behind_socket

from core_rerank import MissingDependencyError, Ranking, Reranker
from core_rerank.integrations.cross_encoder import CoreCrossEncoder
from core_rerank.integrations.source import open_source


@pytest.fixture(scope="module")
def expected(reranker: Reranker) -> Ranking:
    return reranker.rerank(QUERY, DOCUMENTS)


@pytest.fixture(scope="module")
def url(reranker: Reranker) -> Iterator[str]:
    with behind_socket(reranker, api_keys=("key",)) as running:
        yield running.url


def pairs(expected: Ranking, top_n: int | None = None) -> list[tuple[int, float]]:
    return [(item.index, item.score) for item in expected[:top_n]]


# ------------------------------------------------------------------ LangChain


@pytest.fixture
def langchain() -> Any:
    return pytest.importorskip("langchain_core.documents").Document


def lang_order(found: Any) -> list[tuple[int, float]]:
    return [(DOCUMENTS.index(d.page_content), d.metadata["relevance_score"]) for d in found]


def test_langchain(langchain: Any, reranker: Reranker, expected: Ranking, url: str) -> None:
    from core_rerank.integrations.langchain import CoreRerankCompressor

    documents = [langchain(t, metadata={"p": [i]}, id=f"d{i}") for i, t in enumerate(DOCUMENTS)]
    before = copy.deepcopy(documents)
    for compressor in (
        CoreRerankCompressor(reranker=reranker, top_n=3),
        CoreRerankCompressor(base_url=url, api_key="key", top_n=3),
    ):
        found = compressor.compress_documents(documents, QUERY)
        assert lang_order(found) == pairs(expected, 3)
        assert lang_order(asyncio.run(compressor.acompress_documents(documents, QUERY))) == pairs(
            expected, 3
        )
        assert found[0].id == f"d{expected[0].index}"
        assert found[0].metadata["p"] == [expected[0].index]
        assert compressor.compress_documents([], QUERY) == []
        assert asyncio.run(compressor.acompress_documents([], QUERY)) == []
    assert documents == before
    every = CoreRerankCompressor(reranker=reranker, top_n=None)
    assert len(every.compress_documents(documents, QUERY)) == 4
    assert "'key'" not in repr(CoreRerankCompressor(base_url=url, api_key="key"))


def test_langchain_in_a_retriever(langchain: Any, reranker: Reranker, expected: Ranking) -> None:
    retrievers = pytest.importorskip("langchain_classic.retrievers")
    from langchain_core.runnables import RunnableLambda

    from core_rerank.integrations.langchain import CoreRerankCompressor

    first_stage = RunnableLambda(lambda _: [langchain(text) for text in DOCUMENTS])
    retriever = retrievers.ContextualCompressionRetriever(
        base_compressor=CoreRerankCompressor(reranker=reranker, top_n=2), base_retriever=first_stage
    )
    assert lang_order(retriever.invoke(QUERY)) == pairs(expected, 2)
    assert lang_order(asyncio.run(retriever.ainvoke(QUERY))) == pairs(expected, 2)


# ------------------------------------------------------------------ Haystack


@pytest.fixture
def haystack(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    return pytest.importorskip("haystack")


def stack_order(found: Any) -> list[tuple[int, float]]:
    return [(DOCUMENTS.index(d.content), d.score) for d in found["documents"]]


def test_haystack(haystack: Any, reranker: Reranker, expected: Ranking, url: str) -> None:
    from haystack.utils import Secret

    from core_rerank.integrations.haystack import CoreRerankRanker

    documents = [haystack.Document(content=t, meta={"tags": ["a"], "y": None}) for t in DOCUMENTS]
    before = copy.deepcopy(documents)
    for ranker in (
        CoreRerankRanker(reranker=reranker, top_k=3),
        CoreRerankRanker(base_url=url, api_key=Secret.from_token("key"), top_k=3),
    ):
        ranker.warm_up()
        assert stack_order(ranker.run(QUERY, documents)) == pairs(expected, 3)
        assert stack_order(asyncio.run(ranker.run_async(QUERY, documents))) == pairs(expected, 3)
        assert len(ranker.run(QUERY, documents, top_k=1)["documents"]) == 1
        assert ranker.run(QUERY, []) == {"documents": []}
        assert asyncio.run(ranker.run_async(QUERY, [])) == {"documents": []}
        with pytest.raises(ValueError, match="top_k"):
            ranker.run(QUERY, documents, top_k=0)
    assert documents == before


def test_haystack_details(haystack: Any, reranker: Reranker, expected: Ranking) -> None:
    from core_rerank.integrations.haystack import CoreRerankRanker

    ranker = CoreRerankRanker(
        reranker=reranker, meta_fields_to_embed=["title", "year"], score_threshold=0.0
    )
    documents = [
        haystack.Document(id="x", content=DOCUMENTS[1], meta={"title": "T", "year": 5}, score=0.1),
        haystack.Document(id="x", content=DOCUMENTS[0], score=0.7),
        haystack.Document(id="y", content=None, meta={"year": None}),
    ]
    found = ranker.run(QUERY, documents)["documents"]
    assert [(d.id, d.content) for d in found if d.content] == [("x", DOCUMENTS[0])]
    assert all(d.score is not None and d.score >= 0 for d in found)
    assert ranker._texts(documents[:1]) == [f"T\n5\n{DOCUMENTS[1]}"]
    above = expected[0].score + 1
    every = [haystack.Document(content=text) for text in DOCUMENTS]
    assert ranker.run(QUERY, every, score_threshold=above) == {"documents": []}


def test_haystack_saves_and_runs_in_a_pipeline(
    haystack: Any, reranker: Reranker, expected: Ranking, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from haystack.utils import Secret

    from core_rerank.integrations.haystack import CoreRerankRanker

    monkeypatch.setenv("RERANK_KEY", "key")
    ranker = CoreRerankRanker(base_url=url, api_key=Secret.from_env_var("RERANK_KEY"), top_k=2)
    pipeline = haystack.Pipeline()
    pipeline.add_component("ranker", ranker)
    allowed = ["core_rerank.integrations.haystack"]
    again = haystack.Pipeline.loads(pipeline.dumps(), allowed_modules=allowed)
    assert "key" not in json.dumps(ranker.to_dict()).replace("_key", "").replace("KEY", "")
    documents = [haystack.Document(content=text) for text in DOCUMENTS]
    result = again.run({"ranker": {"query": QUERY, "documents": documents}})
    assert stack_order(result["ranker"]) == pairs(expected, 2)
    local = CoreRerankRanker(model="org/model", window="all", settings={"max_tokens_per_doc": 9})
    data = local.to_dict()
    assert CoreRerankRanker.from_dict(copy.deepcopy(data)).to_dict() == data
    bare = CoreRerankRanker.from_dict({"type": data["type"]})
    assert bare.to_dict() == CoreRerankRanker().to_dict()
    for wrong in ({"top_k": 0}, {"top_k": None}, {"window": 0}, {"strategy": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CoreRerankRanker(**wrong)


class Asked:
    """Instead of `core_rerank.rerank`: keeps the queries, ranks with a running reranker."""

    def __init__(self, reranker: Reranker) -> None:
        self.reranker = reranker
        self.queries: list[str] = []
        self.on_the_loop = 0

    def rerank(self, query: str, texts: Any, model: str, **settings: Any) -> Ranking:
        self.queries.append(query)
        try:
            asyncio.get_running_loop()
            self.on_the_loop += 1
        except RuntimeError:
            pass
        return self.reranker.rerank(query, texts, top_n=settings["top_n"])

    async def arerank(self, query: str, texts: Any, model: str, **settings: Any) -> Ranking:
        self.queries.append(query)
        return await self.reranker.arerank(query, texts, top_n=settings["top_n"])


def test_haystack_warms_up_once(
    haystack: Any, reranker: Reranker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core_rerank.integrations import source
    from core_rerank.integrations.haystack import CoreRerankRanker

    def pipeline_of(ranker: Any) -> Any:
        pipeline = haystack.Pipeline()
        pipeline.add_component("ranker", ranker)
        return pipeline

    given = {
        "ranker": {"query": QUERY, "documents": [haystack.Document(content=t) for t in DOCUMENTS]}
    }
    asked = Asked(reranker)
    monkeypatch.setattr(source, "rerank", asked.rerank)
    monkeypatch.setattr(source, "arerank", asked.arerank)
    pipeline = pipeline_of(CoreRerankRanker(model="org/model"))
    for _ in range(2):
        pipeline.run(given)
    assert asked.queries == ["warm up", QUERY, QUERY]

    asked.queries.clear()
    pipeline = pipeline_of(CoreRerankRanker(model="org/model"))

    async def twice() -> None:
        for _ in range(2):
            await pipeline.run_async(given)

    asyncio.run(twice())
    assert asked.queries == ["warm up", QUERY, QUERY]
    assert asked.on_the_loop == 0

    running = Asked(reranker)
    monkeypatch.setattr(reranker, "rerank", running.rerank)
    ranker = CoreRerankRanker(reranker=reranker)
    ranker.warm_up()
    asyncio.run(ranker.warm_up_async())
    assert running.queries == []


def test_haystack_warms_up_again_after_a_failure(
    haystack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core_rerank.integrations import source
    from core_rerank.integrations.haystack import CoreRerankRanker

    tries: list[str] = []

    def broken(query: str, *_: Any, **__: Any) -> Ranking:
        tries.append(query)
        raise OSError("no such model")

    monkeypatch.setattr(source, "rerank", broken)
    ranker = CoreRerankRanker(model="org/model")
    for _ in range(2):
        with pytest.raises(OSError, match="no such model"):
            ranker.warm_up()
    assert tries == ["warm up"] * 2


# ------------------------------------------------------------------ CrossEncoder and BEIR


def test_cross_encoder_rank(reranker: Reranker, expected: Ranking) -> None:
    encoder = CoreCrossEncoder(reranker)
    found = encoder.rank(QUERY, DOCUMENTS)
    assert found == [{"corpus_id": i, "score": s} for i, s in pairs(expected)]
    assert json.loads(json.dumps(found)) == found
    best = encoder.rank(QUERY, DOCUMENTS, top_k=1, return_documents=True, show_progress_bar=False)
    assert best == [{**found[0], "text": DOCUMENTS[expected[0].index]}]
    assert encoder.rank(QUERY, []) == []


def test_cross_encoder_has_the_names_of_the_real_one() -> None:
    import inspect

    real = pytest.importorskip("sentence_transformers").CrossEncoder
    for method in ("rank", "predict"):
        ours = inspect.signature(getattr(CoreCrossEncoder, method)).parameters
        theirs = inspect.signature(getattr(real, method)).parameters
        assert set(ours) <= set(theirs)
        positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == list(theirs)[: len(positional)]


def test_cross_encoder_predict(reranker: Reranker, expected: Ranking) -> None:
    encoder = CoreCrossEncoder(reranker)
    by_place = {item.index: item.score for item in expected}
    other = reranker.rerank("a cat", [DOCUMENTS[2]])[0].score
    inputs = [(QUERY, DOCUMENTS[0]), ("a cat", DOCUMENTS[2]), [QUERY, DOCUMENTS[3]]]
    scores = encoder.predict(inputs, batch_size=1)
    assert isinstance(scores, np.ndarray)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [by_place[0], other, by_place[3]], rtol=1e-6)
    assert encoder.predict([]).shape == (0,)  # type: ignore[union-attr]
    one = encoder.predict([QUERY, DOCUMENTS[0]])
    assert one == pytest.approx(by_place[0])
    assert isinstance(encoder.predict(inputs, convert_to_numpy=False), list)
    for wrong in (["abc"], [(QUERY,)], [(QUERY, "a", "b")], [(QUERY, 1)]):
        with pytest.raises(TypeError):
            encoder.predict(wrong)


def test_beir_reranks_with_it(reranker: Reranker) -> None:
    reranking = pytest.importorskip("beir.reranking")
    corpus = {f"d{i}": {"title": f"T{i}", "text": text} for i, text in enumerate(DOCUMENTS)}
    queries = {"q1": QUERY, "q2": "a cat on a mat"}
    results = {q: {d: float(i) for i, d in enumerate(corpus)} for q in queries}
    found = reranking.Rerank(CoreCrossEncoder(reranker)).rerank(corpus, queries, results, top_k=3)
    for query_id, query in queries.items():
        texts = {d: f"{corpus[d]['title']} {corpus[d]['text']}" for d in ("d1", "d2", "d3")}
        want = reranker.rerank(query, list(texts.values()), doc_ids=list(texts))
        assert found[query_id] == pytest.approx({item.doc_id: item.score for item in want})


# ------------------------------------------------------------------ rerankers


def test_rerankers(reranker: Reranker, expected: Ranking, url: str) -> None:
    library = pytest.importorskip("rerankers")
    from core_rerank.integrations.rerankers import CoreRanker

    for ranker in (CoreRanker(reranker=reranker), CoreRanker(base_url=url, api_key="key")):
        found = ranker.rank(QUERY, DOCUMENTS)
        assert [(r.doc_id, r.score) for r in found] == pairs(expected)
        assert [r.rank for r in found] == [1, 2, 3, 4]
        assert found.top_k(1)[0].text == DOCUMENTS[expected[0].index]
        again = asyncio.run(ranker.rank_async(QUERY, DOCUMENTS, doc_ids=["a", "b", "c", "d"]))
        assert [r.doc_id for r in again] == ["abcd"[i] for i, _ in pairs(expected)]
        assert again.get_score_by_docid("b") == dict(pairs(expected))[1]
        assert ranker.score(QUERY, DOCUMENTS[1]) == pytest.approx(dict(pairs(expected))[1])
        assert ranker.rank(QUERY, []).results_count() == 0
        one = ranker.rank(QUERY, "only")
        assert (one.results_count(), one[0].rank) == (1, 1)
    given = library.Document("tides", doc_id=7, metadata={"m": 1})
    mixed = ranker.rank(QUERY, [given, "text"], metadata=[{"m": 2}, {}])
    assert {r.doc_id: r.metadata for r in mixed} == {7: {"m": 2}, 1: {}}
    assert given.metadata == {"m": 1}
    with pytest.raises(ValueError, match="doc_ids has 1 entries for 2 documents"):
        ranker.rank(QUERY, ["a", "b"], doc_ids=[1])


def test_rerankers_takes_the_model_under_either_name() -> None:
    pytest.importorskip("rerankers")
    from core_rerank.integrations.rerankers import CoreRanker

    for ranker in (CoreRanker("org/m"), CoreRanker(model="org/m"), CoreRanker("org/m", model=None)):
        assert ranker._source.model_name == "org/m"
    with pytest.raises(ValueError, match="'org/m' and model='org/other'"):
        CoreRanker("org/m", model="org/other")


@pytest.mark.parametrize("name", ["model", "query", "documents", "doc_ids", "top_n", "explain"])
def test_settings_that_belong_to_a_call_are_refused_at_once(name: str) -> None:
    with pytest.raises(ValueError, match=f"settings may not hold {name}"):
        open_source(settings={name: 1, "dtype": "float32"})


@pytest.mark.parametrize(
    ("module", "blocked", "told"),
    [
        ("langchain", "langchain_core.documents", r"core-rerank\[langchain\]"),
        ("haystack", "haystack", r"core-rerank\[haystack\]"),
        ("rerankers", "rerankers.documents", "pip install rerankers"),
    ],
)
def test_a_missing_library_is_named(
    module: str, blocked: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"core_rerank.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(MissingDependencyError, match=told):
        __import__(name)
