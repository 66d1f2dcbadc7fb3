"""Rival rankers: windows, parsing, prompts that fit, batches, and what is counted."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_families import FAMILIES

from core_rerank.eval.rivals import CoreRanker, ListwiseRanker, VllmScoreRanker, cross_encoders
from core_rerank.eval.rivals.base import by_score
from core_rerank.eval.rivals.listwise import MAX_WORDS, parse_order, windows

# ------------------------------------------------------------------ windows and answers


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (40, [(20, 40), (10, 30), (0, 20)]),
        (25, [(5, 25), (0, 15)]),
        (20, [(0, 20)]),
        (21, [(1, 21), (0, 11)]),
        (1, [(0, 1)]),
        (0, []),
    ],
)
def test_windows_slide_from_the_bottom_to_the_top(
    count: int, expected: list[tuple[int, int]]
) -> None:
    assert windows(count) == expected


@given(st.integers(1, 200), st.integers(1, 30), st.data())
def test_neighbouring_windows_overlap_and_cover_everything(
    count: int, size: int, data: st.DataObject
) -> None:
    step = data.draw(st.integers(1, size))
    found = windows(count, size, step)
    assert found[0][1] == count
    assert found[-1][0] == 0
    assert all(stop - start <= size for start, stop in found)
    assert all(low[1] >= high[0] for high, low in zip(found, found[1:], strict=False))
    assert len(found) == 1 + max(0, -(-(count - size) // step))


def test_a_step_beyond_the_window_would_skip_passages() -> None:
    with pytest.raises(ValueError, match="step must be between 1 and the window's size 5, not 6"):
        windows(20, 5, 6)


@pytest.mark.parametrize(
    ("answer", "order", "complete"),
    [
        ("[2] > [3] > [1]", (1, 2, 0), True),
        ("2 > 3 > 1", (1, 2, 0), True),
        ("The order, of 3 passages: [3] > [ 1 ] > [2].", (2, 0, 1), True),
        ("[3] > [3] > [1]", (2, 0, 1), False),  # repeated, and one missing
        ("[3] > [2] > [1] > [2]", (2, 1, 0), False),  # repeated alone
        ("[2]", (1, 0, 2), False),
        ("[9] > [0] > [2] > [1] > [3]", (1, 0, 2), False),
        ("I cannot say.", (0, 1, 2), False),
        ("", (0, 1, 2), False),
        ("9" * 5000, (0, 1, 2), False),  # longer than int() takes
        ("<think>[1] > [2] > [3]?</think>[3] > [2] > [1]", (2, 1, 0), True),
    ],
)
def test_answers_are_mended_and_that_is_said(
    answer: str, order: tuple[int, ...], complete: bool
) -> None:
    assert parse_order(answer, 3) == (order, complete)


@given(st.text(alphabet="[]> 0123456789abc\n", max_size=200), st.integers(1, 25))
def test_every_answer_gives_a_permutation(answer: str, count: int) -> None:
    order, complete = parse_order(answer, count)
    assert sorted(order) == list(range(count))
    assert not complete or len(re.findall("[0-9]+", answer)) >= count


# ------------------------------------------------------------------ listwise generation


class Sorter:
    """An engine that answers with the passages' numbers in the order of their first words."""

    def __init__(self, tokenizer: Any, mend: Callable[[str], str] = lambda answer: answer) -> None:
        self.tokenizer = tokenizer
        self.mend = mend
        self.prompts: list[list[str]] = []

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[Any]:
        texts = [self.tokenizer.decode(p["prompt_token_ids"]) for p in prompts]
        self.prompts.append(texts)
        return [self.answer(text, p) for text, p in zip(texts, prompts, strict=True)]

    def answer(self, text: str, prompt: Any) -> Any:
        passages = dict(re.findall(r"^\[(\d+)\] (\w*)", text, flags=re.MULTILINE))
        order = sorted(passages, key=lambda number: passages[number])
        answer = self.mend(" > ".join(f"[{number}]" for number in order))
        output = SimpleNamespace(text=answer, token_ids=self.tokenizer(answer)["input_ids"])
        return SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[output])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FAMILIES["byte-level"]()


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))


def letters(count: int) -> list[str]:
    """Passages whose right order is the reverse of the given one."""
    return [f"{chr(ord('a') + place)}x tail" for place in reversed(range(count))]


def test_the_best_passages_rise_through_all_windows(tokenizer: Any) -> None:
    engine = Sorter(tokenizer)
    ranker = ListwiseRanker(engine, tokenizer, 100_000, window=4, step=2)
    result = ranker.rank("a query", letters(10))
    assert [len(batch) for batch in engine.prompts] == [1, 1, 1, 1]
    assert result.order[:2] == (9, 8)  # what one pass from the bottom guarantees
    assert sorted(result.order) == list(range(10))
    assert result.scores is None
    assert result.failures == 0
    assert result.input_tokens == sum(
        len(tokenizer(text)["input_ids"]) for batch in engine.prompts for text in batch
    )
    assert result.output_tokens > 0
    assert all("a query" in text for batch in engine.prompts for text in batch)


def test_queries_share_batches_and_equal_their_own_runs(tokenizer: Any) -> None:
    tasks = [("one", letters(10)), ("two", letters(3)), ("three", [])]
    engine = Sorter(tokenizer)
    ranker = ListwiseRanker(engine, tokenizer, 100_000, window=4, step=2)
    together = ranker.rank_batch(tasks)
    assert [len(batch) for batch in engine.prompts] == [2, 1, 1, 1]
    for task, result in zip(tasks, together, strict=True):
        alone = ranker.rank(*task)
        assert (result.order, result.input_tokens) == (alone.order, alone.input_tokens)
    assert together[1].order == (2, 1, 0)
    assert together[2].order == ()


def test_answers_that_had_to_be_mended_are_counted(tokenizer: Any) -> None:
    engine = Sorter(tokenizer, mend=lambda answer: answer.replace("[1]", "[77]"))
    result = ListwiseRanker(engine, tokenizer, 100_000, window=4, step=2).rank("q", letters(6))
    assert result.failures == 2
    assert sorted(result.order) == list(range(6))


def test_long_passages_are_cut_to_fit(tokenizer: Any) -> None:
    engine = Sorter(tokenizer)
    texts = [f"{letter}x " + "word " * 2 * MAX_WORDS for letter in "cab"]
    roomy = ListwiseRanker(engine, tokenizer, 1_000_000)
    roomy.rank("q", texts)
    assert engine.prompts[-1][0].count("word") == 3 * (MAX_WORDS - 1)
    whole = len(tokenizer(engine.prompts[-1][0])["input_ids"])
    limit = whole // 2
    result = ListwiseRanker(engine, tokenizer, limit).rank("q", texts)
    assert whole // 4 < result.input_tokens < limit
    assert result.order == (1, 2, 0)
    with pytest.raises(ValueError, match="do not fit 100 tokens: give a smaller window"):
        ListwiseRanker(engine, tokenizer, 100).rank("q", texts)


# ------------------------------------------------------------------ rankers with scores


def test_by_score_keeps_the_order_of_equals() -> None:
    assert by_score([1.0, 3.0, 1.0, 3.0]) == (1, 3, 0, 2)


def test_core_ranker_gives_the_rerankers_order_and_counts_its_tokens(tokenizer: Any) -> None:
    backend = FakeBackend(tokenizer)
    ranker = CoreRanker(backend, heads=["1-2"], window="all")
    documents = ["a dog barked", "the cat sat", "nothing of the kind"]
    result = ranker.rank("cat", documents)
    assert result.order[0] == 1
    assert result.scores is not None
    assert by_score(result.scores) == result.order
    assert result.input_tokens == sum(len(r.prompt_token_ids) for r in backend.batches[0])
    assert (result.output_tokens, result.failures) == (0, 0)
    batch = ranker.rank_batch([("cat", documents), ("dog", documents)])
    assert [r.order[0] for r in batch] == [1, 0]
    assert ranker.rank_batch([]) == []


def test_vllm_scores_are_shared_out_by_query() -> None:
    calls: list[Any] = []

    def score(queries: list[str], documents: list[str], **how: Any) -> list[Any]:
        calls.append((queries, documents, how))
        return [
            SimpleNamespace(
                outputs=SimpleNamespace(score=len(d)), prompt_token_ids=[0] * len(q + d)
            )
            for q, d in zip(queries, documents, strict=True)
        ]

    ranker = VllmScoreRanker(SimpleNamespace(score=score), "Q: {}", "D: {} {json}")
    first, second, third = ranker.rank_batch([("q", ["a", "ccc"]), ("empty", []), ("r", ["bb"])])
    queries, documents, how = calls[0]
    assert queries == ["Q: q", "Q: q", "Q: r"]
    assert documents == ["D: a {json}", "D: ccc {json}", "D: bb {json}"]
    assert how["tokenization_kwargs"] == {"truncate_prompt_tokens": -1, "truncation_side": "right"}
    assert first.order == (1, 0)
    assert first.input_tokens == 2 * len("Q: q") + len("D: a {json}") + len("D: ccc {json}")
    assert (second.order, second.scores) == ((), ())
    assert third.order == (0,)


def test_sentence_transformers_are_asked_in_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class CrossEncoder:
        def __init__(self, model: str, **options: Any) -> None:
            assert options == {"max_length": 512}
            self.max_seq_length = 512
            self.tokenizer = lambda queries, texts, **_: {
                "input_ids": [[0] * len(q + t) for q, t in zip(queries, texts, strict=True)]
            }

        def predict(self, pairs: Any, *, batch_size: int, show_progress_bar: bool) -> list[float]:
            assert (batch_size, show_progress_bar) == (4, False)
            return [float(len(text)) for _, text in pairs]

    module = SimpleNamespace(CrossEncoder=CrossEncoder)
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    monkeypatch.setattr(cross_encoders, "find_spec", lambda _: object())
    ranker = cross_encoders.SentenceTransformersRanker("some/model", batch_size=4, max_length=512)
    result = ranker.rank("q", ["a", "ccc"])
    assert (result.order, result.scores, result.input_tokens) == ((1, 0), (1.0, 3.0), 6)
    monkeypatch.setattr(cross_encoders, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'core-rerank\[dense\]'"):
        cross_encoders.SentenceTransformersRanker("some/model")
