"""First stages as LlamaIndex retrievers, with the real library."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from core_rerank.errors import DataError, MissingDependencyError
from core_rerank.retrievers import BM25Retriever, RunFileRetriever, as_llama_index
from core_rerank.retrievers import llama_index as module
from core_rerank.types import Document

pytest.importorskip("llama_index.core")

CORPUS = {
    "a": Document("ash and lava", "a", "Volcano", {"page": 3}),
    "b": Document("lava lava lava", "b"),
    "c": Document("bread", "c"),
}


@pytest.fixture
def bm25() -> BM25Retriever:
    retriever = BM25Retriever()
    retriever.index(CORPUS)
    return retriever


def test_nodes_carry_ids_texts_metadata_and_scores(bm25: BM25Retriever) -> None:
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import MetadataMode, QueryBundle, TextNode

    retriever = as_llama_index(bm25, CORPUS)
    assert isinstance(retriever, BaseRetriever)
    nodes = retriever.retrieve("lava")
    assert [found.node.node_id for found in nodes] == ["b", "a"]
    assert [found.score for found in nodes] == list(bm25.search({"q": "lava"}, 10)["q"].values())
    assert isinstance(nodes[1].node, TextNode)
    assert nodes[1].node.metadata == {"title": "Volcano", "page": 3}
    assert nodes[1].node.get_content(metadata_mode=MetadataMode.NONE) == "ash and lava"
    assert nodes[0].node.metadata == {}
    assert retriever.retrieve(QueryBundle("bread"))[0].node.node_id == "c"
    assert retriever.retrieve("quantum") == []


def test_async_gives_the_same_and_several_at_once(bm25: BM25Retriever) -> None:
    retriever = as_llama_index(bm25, CORPUS, top_k=1)

    async def ask() -> list[list[str]]:
        answers = await asyncio.gather(
            *(retriever.aretrieve(query) for query in ("lava", "bread", "ash") * 5)
        )
        return [[found.node.node_id for found in nodes] for nodes in answers]

    assert asyncio.run(ask()) == [["b"], ["c"], ["a"]] * 5


def test_it_answers_inside_a_llama_index_pipeline(bm25: BM25Retriever) -> None:
    from llama_index.core.llms import MockLLM
    from llama_index.core.postprocessor import SimilarityPostprocessor
    from llama_index.core.query_engine import RetrieverQueryEngine

    engine = RetrieverQueryEngine.from_args(
        as_llama_index(bm25, CORPUS),
        llm=MockLLM(),
        response_mode="compact",
        node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.0)],
    )
    response = engine.query("lava")
    assert [found.node.node_id for found in response.source_nodes] == ["b", "a"]
    assert "lava lava lava" in str(response)  # MockLLM says its prompt


def test_a_run_file_needs_the_ids_of_the_queries(tmp_path: Path) -> None:
    (tmp_path / "run.trec").write_text("q7 Q0 c 1 2.5 t\nq7 Q0 a 2 1.5 t\n")
    run = RunFileRetriever(tmp_path / "run.trec")
    retriever = as_llama_index(run, CORPUS, query_ids={"what?": "q7"})
    assert [found.node.node_id for found in retriever.retrieve("what?")] == ["c", "a"]
    with pytest.raises(DataError, match="query_ids has no id for the query 'why"):
        retriever.retrieve("why?")


def test_a_document_without_a_text_is_named(bm25: BM25Retriever) -> None:
    with pytest.raises(DataError, match="document 'b' was found but is not among the 1 documents"):
        as_llama_index(bm25, {"a": CORPUS["a"]}).retrieve("lava")
    with pytest.raises(ValueError, match="top_k must be"):
        as_llama_index(bm25, CORPUS, top_k=0)


def test_a_missing_package_is_named_with_its_extra(
    bm25: BM25Retriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_index.core.retrievers", None)
    module._adapter_class.cache_clear()
    with pytest.raises(MissingDependencyError, match=r"pip install 'core-rerank\[llama-index\]'"):
        as_llama_index(bm25, CORPUS)
