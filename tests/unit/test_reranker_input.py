"""What `Reranker.rerank` takes: documents, queries, ids, limits; and what it refuses."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
from fake_backend import DOCUMENTS, FakeBackend, Make, shared_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core_rerank import ClosedError, Document, NotFiniteError, Reranker
from core_rerank.prompt import NULL_QUERY, PromptError
from hook_runtime.specs import CaptureRequest, Head


def test_no_documents_need_no_engine(make: Make, backend: FakeBackend) -> None:
    ranking = make().rerank("cat", [])
    assert (len(ranking), list(ranking), ranking.query) == (0, [], "cat")
    assert ranking.to_dict()["documents"] == []
    assert not backend.batches


def test_one_document_gives_a_ranking_of_one(make: Make) -> None:
    ranking = make().rerank("cat", ["only"])
    assert [(item.index, item.rank) for item in ranking] == [(0, 1)]


def test_blank_documents_come_last_and_are_flagged(make: Make, backend: FakeBackend) -> None:
    documents = ["", "cat", " \n\t", "dog", Document("  ", title="")]
    ranking = make().rerank("cat", documents, explain=True)
    assert [item.index for item in ranking] == [1, 3, 0, 2, 4]
    assert [item.blank for item in ranking] == [False, False, True, True, True]
    lowest = ranking[1].score
    assert {item.score for item in ranking if item.blank} == {min(0.0, lowest)}
    assert ranking[4].token_scores == ()
    assert len(backend.batches[0]) == 4


def test_the_score_of_a_blank_document_is_at_most_zero(make: Make) -> None:
    ranking = make(calibrate=False).rerank("cat", ["cat", ""])
    assert ranking[0].score > 0
    assert ranking[1].score == 0.0


def test_only_blank_documents_need_no_engine(make: Make, backend: FakeBackend) -> None:
    ranking = make().rerank("cat", ["", " "])
    assert [(item.index, item.score, item.blank) for item in ranking] == [
        (0, 0.0, True),
        (1, 0.0, True),
    ]
    assert not backend.batches


def test_a_document_of_a_title_alone_is_not_blank(make: Make) -> None:
    ranking = make().rerank("cat", [Document("", title="cat"), "dog"])
    assert [(item.index, item.blank) for item in ranking] == [(0, False), (1, False)]


def test_a_document_without_tokens_is_blank(smollm2_tokenizer: Any) -> None:
    # SmolLM2's vocabulary has no token for this character's byte.
    reranker = Reranker(backend=FakeBackend(smollm2_tokenizer), heads=["0-0"])
    ranking = reranker.rerank("cat", ["cat", "\x16"])
    assert [(item.index, item.blank) for item in ranking] == [(0, False), (1, True)]


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (None, "None"),
        (7, "int"),
        (b"bytes", "bytes"),
        (["list"], "list"),
        ({"text": "a"}, "dict"),
        (1.5, "float"),
    ],
)
def test_other_documents_are_named_by_place_and_type(make: Make, bad: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"document 1 is {kind}: expected a string or"):
        make().rerank("cat", ["fine", bad])


@pytest.mark.parametrize("field", ["text", "title"])
def test_documents_with_a_wrong_field_are_named(make: Make, field: str) -> None:
    document = Document(**({"text": "fine"} | {field: 3}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=rf"document 0 has a {field} of type int"):
        make().rerank("cat", [document])


@pytest.mark.parametrize(
    "documents", ["a single string", b"bytes", None, 3, {"a": "b"}, Document("a")]
)
def test_documents_must_be_a_list(make: Make, documents: Any) -> None:
    with pytest.raises(TypeError, match="documents must be a list of strings or Documents, not"):
        make().rerank("cat", documents)


@pytest.mark.parametrize("query", ["", "  ", "\n\t"])
@pytest.mark.parametrize("documents", [[], ["a"]])
def test_a_blank_query_is_refused(make: Make, query: str, documents: list[str]) -> None:
    with pytest.raises(ValueError, match="query is blank"):
        make().rerank(query, documents)


@pytest.mark.parametrize("query", [None, 3, b"cat", ["cat"]])
def test_a_query_that_is_no_string_is_refused(make: Make, query: Any) -> None:
    with pytest.raises(TypeError, match="query must be a string, not"):
        make().rerank(query, DOCUMENTS)


def test_a_query_without_tokens_is_refused(smollm2_tokenizer: Any) -> None:
    reranker = Reranker(backend=FakeBackend(smollm2_tokenizer), heads=["0-0"])
    with pytest.raises(ValueError, match="the query has no text that the model's tokenizer knows"):
        reranker.rerank("\x16", DOCUMENTS)


@pytest.mark.parametrize("top_n", [0, -1, True, False, "2", 1.0, np.bool_(True)])
@pytest.mark.parametrize("documents", [[], DOCUMENTS])
def test_a_bad_top_n_is_refused(make: Make, top_n: Any, documents: list[str]) -> None:
    with pytest.raises(ValueError, match="top_n must be a whole number from 1, or None"):
        make().rerank("cat", documents, top_n=top_n)


def test_top_n(make: Make) -> None:
    reranker = make()
    whole = reranker.rerank("cat", DOCUMENTS)
    for top_n, count in ((1, 1), (3, 3), (4, 4), (99, 4), (None, 4), (np.int64(2), 2)):
        best = reranker.rerank("cat", DOCUMENTS, top_n=top_n)
        assert best.documents == whole.documents[:count]


def test_top_n_counts_blank_documents_last(make: Make) -> None:
    ranking = make().rerank("cat", ["", "cat", "dog"], top_n=2)
    assert [item.index for item in ranking] == [1, 2]


@pytest.mark.parametrize("window", [1, 2])
def test_duplicates_are_both_kept_and_tie_in_input_order(make: Make, window: int) -> None:
    ranking = make(window=window).rerank("cat", ["dog", "cat", "dog", "cat"])
    assert [item.index for item in ranking] == [1, 3, 0, 2]
    assert ranking[0].score == ranking[1].score
    assert ranking[2].score == ranking[3].score


def test_equal_prompts_are_computed_once(make: Make, backend: FakeBackend) -> None:
    make().rerank("cat", ["same"] * 5)
    assert [len(batch) for batch in backend.batches] == [2]


def test_ids_are_echoed_with_their_type(make: Make) -> None:
    ids = ["a", 7, "7", 0]
    ranking = make().rerank("cat", DOCUMENTS, doc_ids=ids)
    for item in ranking:
        assert item.doc_id is ids[item.index]
        assert item.document.doc_id is ids[item.index]


def test_ids_of_documents(make: Make) -> None:
    documents = [Document("cat", doc_id="x"), Document("dog", doc_id=0), "no id"]
    ranking = make().rerank("cat", documents)
    assert {item.index: item.doc_id for item in ranking} == {0: "x", 1: 0, 2: None}
    again = make().rerank("cat", documents, doc_ids=[1, 2, 3])
    assert {item.index: item.doc_id for item in again} == {0: 1, 1: 2, 2: 3}
    assert [item.document for item in again if item.index == 0] == [documents[0]]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (["a", "b"], ValueError, "doc_ids has 2 ids for 4 documents"),
        (list("abcde"), ValueError, "doc_ids has 5 ids for 4 documents"),
        (["a", "b", "a", "c"], ValueError, "documents 0 and 2 have the same id 'a'"),
        ([1, 2, 3, 3], ValueError, "documents 2 and 3 have the same id 3"),
        (["a", None, "b", "c"], TypeError, "the id of document 1 is None"),
        (["a", True, "b", "c"], TypeError, "the id of document 1 is bool"),
        ([1.5, 2, 3, 4], TypeError, "the id of document 0 is float"),
        ("abcd", TypeError, "doc_ids must be a list of ids, not str"),
        (5, TypeError, "doc_ids must be a list of ids, not int"),
    ],
)
def test_bad_ids_are_refused(make: Make, ids: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make().rerank("cat", DOCUMENTS, doc_ids=ids)


def test_documents_with_equal_ids_are_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="documents 0 and 1 have the same id 'a'"):
        make().rerank("cat", [Document("x", doc_id="a"), Document("y", doc_id="a")])


def test_any_iterable_of_documents_will_do(make: Make) -> None:
    reranker = make()
    expected = reranker.rerank("cat", DOCUMENTS)
    assert reranker.rerank("cat", (d for d in DOCUMENTS)) == expected
    assert reranker.rerank("cat", tuple(DOCUMENTS)) == expected
    assert reranker.rerank("cat", np.array(DOCUMENTS)) == expected
    ids = iter([1, 2, 3, 4])
    assert len(reranker.rerank("cat", iter(DOCUMENTS), doc_ids=ids)) == 4


def test_inputs_are_never_changed(make: Make) -> None:
    documents = [Document("cat", "a", "t", {"tags": ["x"]}), Document(""), "dog"]
    ids: list[str | int] = ["a", "b", "c"]
    before = copy.deepcopy((documents, ids))
    ranking = make().rerank("cat", documents, doc_ids=ids, explain=True)
    assert (documents, ids) == before
    assert next(item for item in ranking if item.index == 0).document is documents[0]


def test_long_documents_are_cut_and_flagged(make: Make) -> None:
    documents = ["short cat", "long " * 3000, "cat " * 40]
    for window in (1, "all"):
        ranking = make(window=window).rerank("cat", documents, explain=True)
        assert {item.index for item in ranking if item.truncated} == {1}
        long = next(item for item in ranking if item.index == 1)
        assert len(long.token_scores or ()) == 512
    cut = make(max_tokens_per_doc=10).rerank("cat", documents)
    assert {item.index for item in cut if item.truncated} == {1, 2}


def test_a_document_longer_than_the_context(tokenizer: Any) -> None:
    backend = FakeBackend(tokenizer, max_model_len=200)
    reranker = Reranker(backend=backend, heads=["0-0"], window=1)
    ranking = reranker.rerank("cat", ["dog " * 5000, "cat"])
    assert {item.index: item.truncated for item in ranking} == {0: True, 1: False}
    assert max(len(r.prompt_token_ids) for r in backend.batches[0]) <= 199


def test_what_does_not_fit_names_the_fix(tokenizer: Any) -> None:
    backend = FakeBackend(tokenizer, max_model_len=300)
    reranker = Reranker(backend=backend, heads=["0-0"], window="all")
    with pytest.raises(PromptError, match=r"window=\d"):
        reranker.rerank("cat", ["dog " * 50] * 100)
    with pytest.raises(ValueError, match="Shorten the query"):
        reranker.rerank("cat " * 500, ["dog"])
    assert not backend.batches


def test_lone_surrogates_are_read_as_replacement_characters(make: Make) -> None:
    documents = ["cat \ud83d", "cat \ufffd", "dog"]
    ranking = make().rerank("cat \udc00", documents, explain=True)
    assert ranking[0].score == ranking[1].score
    assert ranking[0].document.text == documents[0]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [1, "all"])
@pytest.mark.parametrize("under", ["query", "null"])
def test_numbers_that_are_not_finite_name_the_document(
    tokenizer: Any, value: float, window: Any, under: str
) -> None:
    poison = tokenizer(" poison")["input_ids"]
    null = tokenizer(f" {NULL_QUERY}")["input_ids"]

    def attention(request: CaptureRequest, head: Head) -> np.ndarray:
        values = shared_tokens(request, head)
        ids = request.prompt_token_ids
        is_null = list(ids[slice(*request.probe.query_span)]) == null
        columns = [ids[i] for a, b in request.probe.spans for i in range(a, b)]
        if is_null == (under == "null"):
            values[np.isin(columns, poison)] = value
        return values

    backend = FakeBackend(tokenizer, attention=attention)
    reranker = Reranker(backend=backend, heads=["0-0"], window=window)
    for _ in range(2):
        with pytest.raises(NotFiniteError, match=r"not finite for document 2 \(id 'c'\)"):
            reranker.rerank("cat", ["", "cat", "a poison"], doc_ids=["a", "b", "c"])
    assert len(reranker.rerank("cat", ["cat", "dog"])) == 2


def test_use_after_close(make: Make, backend: FakeBackend) -> None:
    with make() as reranker:
        reranker.rerank("cat", DOCUMENTS)
    for _ in range(2):
        reranker.close()
    with pytest.raises(ClosedError, match=r"this Reranker for test/fake was closed"):
        reranker.rerank("cat", [])
    with pytest.raises(ClosedError):
        reranker.rerank_batch([])
    assert not backend.closed, "a backend that was given stays open"


def test_threads_share_a_reranker(make: Make) -> None:
    reranker = make()
    queries = ["cat", "dog", "mat", "nothing of the kind", "barked"]
    expected = {query: make().rerank(query, DOCUMENTS, explain=True) for query in queries}
    wrong = []

    def work(query: str) -> None:
        for _ in range(5):
            if reranker.rerank(query, DOCUMENTS, explain=True) != expected[query]:
                wrong.append(query)

    threads = [threading.Thread(target=work, args=(query,)) for query in queries * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


texts = st.text(st.sampled_from("cat dog🏳️‍🌈東\n <|im_end|>"), max_size=12)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(documents=st.lists(texts, max_size=8), window=st.sampled_from([1, 2, "all"]))
def test_a_ranking_is_a_permutation(make: Make, documents: list[str], window: int | str) -> None:
    ranking = make(window=window).rerank("cat dog", documents)
    assert sorted(item.index for item in ranking) == list(range(len(documents)))
    order = [(item.blank, -item.score, item.index) for item in ranking]
    assert order == sorted(order)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), documents=st.lists(texts, min_size=1, max_size=8))
def test_pointwise_scores_do_not_depend_on_the_order(
    make: Make, data: st.DataObject, documents: list[str]
) -> None:
    order = data.draw(st.permutations(range(len(documents))))
    straight = make().rerank("cat dog", documents)
    shuffled = make().rerank("cat dog", [documents[i] for i in order])
    assert {order[item.index]: (item.score, item.blank) for item in shuffled} == {
        item.index: (item.score, item.blank) for item in straight
    }
