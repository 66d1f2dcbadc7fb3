"""One vLLM engine that ranks documents and answers from them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines import DEFAULTS
from services import DOCUMENTS, QUERY

from core_rerank import Reranker
from hook_runtime import AsyncHookLLM, HookLLM

pytestmark = pytest.mark.engine

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def greedy(tokens: int = 24) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens)


@pytest.fixture(scope="module")
def plain_texts(smollm2_dir: Path) -> Any:
    """Function from prompts to what transformers, which knows nothing of us, answers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)

    def answer(prompt: Any) -> str:
        ids = torch.tensor([prompt["prompt_token_ids"]])
        said = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(said, skip_special_tokens=True)

    return lambda prompts: [answer(prompt) for prompt in prompts]


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> Iterator[HookLLM]:
    with HookLLM(str(smollm2_dir), name=MODEL, **DEFAULTS) as running:
        yield running


def cached(output: Any) -> int:
    return int(output.num_cached_tokens or 0)


def documents_end(reranker: Reranker, documents: Sequence[str]) -> int:
    """Tokens up to the end of the documents in a prompt that has all of them."""
    prompt = reranker._reader.builder.build(QUERY, documents)
    return prompt.document_spans[-1][1]


def test_it_ranks_and_answers_from_what_it_ranked(llm: HookLLM, plain_texts: Any) -> None:
    documents = [f"{text} That is fact number {i}." for i, text in enumerate(DOCUMENTS * 3)]
    listwise = Reranker.from_llm(llm, window="all")
    ranking = listwise.rerank(QUERY, documents)
    best = [r.index for r in ranking[:3]]
    whole = listwise.answer_prompt(QUERY, documents, relevant=best)
    (answer,) = llm.generate(whole, greedy())
    # all full blocks of the documents come from the ranking
    assert cached(answer) >= documents_end(listwise, documents) // 32 * 32 > 200

    pointwise = Reranker.from_llm(llm)  # one document a prompt: the first one alone is shared
    order = [documents[r.index] for r in pointwise.rerank(QUERY, documents)[:3]]
    few = pointwise.answer_prompt(QUERY, order)
    (short,) = llm.generate(few, greedy())
    assert cached(short) >= documents_end(pointwise, order[:1]) // 32 * 32
    # what was generated under the captures' salt harms no ranking that comes after it
    again = listwise.rerank("How is bread made?", documents)
    assert llm.llm.reset_prefix_cache()
    fresh = Reranker.from_llm(llm, window="all").rerank("How is bread made?", documents)
    assert [r.index for r in again] == [r.index for r in fresh]
    assert [r.score for r in again] == pytest.approx([r.score for r in fresh], abs=1e-4)
    assert [answer.outputs[0].text, short.outputs[0].text] == plain_texts([whole, few])


def test_many_rank_while_others_are_answered(smollm2_dir: Path, plain_texts: Any) -> None:
    async def answered(llm: AsyncHookLLM, prompt: Any) -> str:
        text = ""
        async for output in llm.generate(prompt, greedy()):
            text = output.outputs[0].text
        return text

    async def check() -> tuple[list[Any], list[str]]:
        llm = await AsyncHookLLM.start(str(smollm2_dir), name=MODEL, **DEFAULTS)
        async with llm:
            reranker = Reranker.from_llm(llm)
            alone = await reranker.arerank(QUERY, DOCUMENTS)
            prompts = [
                reranker.answer_prompt(QUERY, [DOCUMENTS[r.index] for r in alone[:n]])
                for n in (1, 2, 3)
            ]
            results: list[Any] = await asyncio.gather(
                *(reranker.arerank(QUERY, DOCUMENTS) for _ in range(8)),
                *(answered(llm, prompt) for prompt in prompts),
            )
            in_thread = await asyncio.to_thread(reranker.rerank, QUERY, DOCUMENTS)
            for ranking in (*results[:8], in_thread):
                assert [r.index for r in ranking] == [r.index for r in alone]
            return prompts, results[8:]

    prompts, texts = asyncio.run(check())
    assert texts == plain_texts(prompts)


def test_a_llama_index_pipeline_on_one_engine(llm: HookLLM) -> None:
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
    from llama_index.core.query_engine import RetrieverQueryEngine
    from llama_index.core.retrievers import QueryFusionRetriever
    from llama_index.core.schema import TextNode

    from core_rerank.integrations.llama_index import CoreRerank

    prompts: list[str] = []

    class OnOurEngine(CustomLLM):
        @property
        def metadata(self) -> LLMMetadata:
            return LLMMetadata(context_window=1024, num_output=24, model_name=MODEL)

        def complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
            prompts.append(prompt)
            (output,) = llm.chat([{"role": "user", "content": prompt}], greedy())
            return CompletionResponse(text=output.outputs[0].text)

        def stream_complete(self, prompt: str, formatted: bool = False, **_: Any) -> Any:
            yield self.complete(prompt)

    reranker = Reranker.from_llm(llm)
    index = VectorStoreIndex(
        [TextNode(text=text, id_=f"n{i}") for i, text in enumerate(DOCUMENTS)],
        embed_model=MockEmbedding(embed_dim=8),
    )
    best = [DOCUMENTS[r.index] for r in reranker.rerank(QUERY, DOCUMENTS, top_n=2)]
    rerank = CoreRerank(reranker, top_n=2)
    ours = OnOurEngine()
    fusion = QueryFusionRetriever(
        [index.as_retriever(similarity_top_k=4), index.as_retriever(similarity_top_k=4)],
        llm=ours, num_queries=1, similarity_top_k=4, use_async=False,
    )  # fmt: skip
    for engine in (
        index.as_query_engine(llm=ours, similarity_top_k=4, node_postprocessors=[rerank]),
        RetrieverQueryEngine.from_args(fusion, llm=ours, node_postprocessors=[rerank]),
    ):
        response = engine.query(QUERY)
        assert [n.node.get_content() for n in response.source_nodes] == best
        assert all(text in prompts[-1] for text in best)
        (output,) = llm.chat([{"role": "user", "content": prompts[-1]}], greedy())
        assert str(response) == output.outputs[0].text != ""
