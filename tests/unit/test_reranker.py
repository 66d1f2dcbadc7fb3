"""Reranker on a fake backend: the input contract, windows, calibration, ties, threads."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from fake_backend import FakeBackend, SharedFakeBackend, shared_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizer_families import FAMILIES

from core_rerank import ClosedError, Document, HeadSet, HeadSetError, NotFiniteError, Reranker
from core_rerank.prompt import NULL_QUERY, PromptError
from hook_runtime.errors import EngineDeadError, IncompleteCaptureError, ProbeError
from hook_runtime.specs import Capture, CaptureRequest, Head

DOCUMENTS = ["the cat sat on the mat", "a dog barked", "cat and dog", "nothing of the kind"]
Make = Callable[..., Reranker]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FAMILIES["byte-level"]()


@pytest.fixture
def backend(tokenizer: Any) -> FakeBackend:
    return FakeBackend(tokenizer)


@pytest.fixture
def make(backend: FakeBackend) -> Make:
    def make(**settings: Any) -> Reranker:
        settings = {"backend": backend, "heads": ["1-2", "0-1"], "window": 1} | settings
        return Reranker(**settings)

    return make


def null_requests(backend: FakeBackend) -> list[CaptureRequest]:
    """The requests whose rows are those of the null query."""
    null = tuple(backend.tokenizer(f" {NULL_QUERY}")["input_ids"])
    return [
        request
        for batch in backend.batches
        for request in batch
        if request.prompt_token_ids[slice(*request.probe.query_span)] == null
    ]


# ------------------------------------------------------------------ what comes back


@pytest.mark.parametrize("window", ["all", 1, 2, 3])
@pytest.mark.parametrize("strategy", ["core", "icr", "qr"])
def test_the_best_document_is_first(make: Make, strategy: str, window: object) -> None:
    heads = None if strategy == "icr" else ["1-2", "0-1"]
    ranking = make(strategy=strategy, window=window, heads=heads).rerank("cat mat", DOCUMENTS)
    assert ranking[0].index == 0
    assert sorted(item.index for item in ranking) == [0, 1, 2, 3]
    assert [item.rank for item in ranking] == [1, 2, 3, 4]
    assert [item.document.text for item in ranking] == [DOCUMENTS[item.index] for item in ranking]
    scores = [item.score for item in ranking]
    assert scores == sorted(scores, reverse=True)
    assert all(type(score) is float for score in scores)
    assert (ranking.query, ranking.model, ranking.strategy) == ("cat mat", "test/fake", strategy)


def test_the_score_is_the_sum_of_the_kept_calibrated_tokens(
    make: Make, backend: FakeBackend
) -> None:
    item = make().rerank("cat mat", DOCUMENTS, explain=True)[0]
    assert item.token_scores is not None
    kept = [token.score for token in item.token_scores if token.kept]
    assert item.score == pytest.approx(sum(kept))
    assert "".join(token.text for token in item.token_scores) == DOCUMENTS[0]
    by_hand = {}
    for request in backend.batches[0][:2]:
        by_hand[request.probe.query_span] = sum(
            shared_tokens(request, head).astype(np.float32).astype(np.float64)
            for head in (Head(1, 2), Head(0, 1))
        )
    query, null = by_hand.values()
    given = [token.score for token in item.token_scores]
    assert given == pytest.approx((query - null).tolist(), rel=1e-6, abs=1e-6)  # float32 on the way


def test_calibration_can_be_turned_off(make: Make, backend: FakeBackend) -> None:
    plain = make(calibrate=False).rerank("cat mat", DOCUMENTS)
    assert len(backend.batches[0]) == len(DOCUMENTS)
    assert not null_requests(backend)
    assert all(item.score > 0 for item in plain)


def test_rows_and_heads_of_each_strategy(make: Make, backend: FakeBackend) -> None:
    for strategy, heads in (("core", ["1-2"]), ("qr", ["1-2"]), ("icr", None)):
        make(strategy=strategy, heads=heads, calibrate=False).rerank("cat", ["a cat"])
    core, qr, icr = (batch[0] for batch in backend.batches)
    assert core.probe.heads == qr.probe.heads == (Head(1, 2),)
    assert icr.probe.heads == "all"
    assert core.probe.query_span == icr.probe.query_span
    decode = backend.tokenizer.decode
    assert decode(core.prompt_token_ids[slice(*core.probe.query_span)]) == " cat"
    rows = decode(qr.prompt_token_ids[slice(*qr.probe.query_span)])
    assert rows.startswith("Please find")
    assert rows.endswith("Query: cat<|im_end|>\n<|im_start|>assistant")


def test_explanations_only_on_request(make: Make) -> None:
    assert make().rerank("cat", DOCUMENTS)[0].token_scores is None


def test_the_qr_strategy_keeps_every_token(make: Make) -> None:
    ranking = make(strategy="qr").rerank("cat", ["cat " * 30 + "dog"], explain=True)
    assert all(token.kept for token in ranking[0].token_scores or ())


# ------------------------------------------------------------------ the input contract


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


# ------------------------------------------------------------------ batches and the null memory


def test_a_batch_is_one_engine_call_with_the_same_results(make: Make, backend: FakeBackend) -> None:
    tasks: list[tuple[str, Sequence[str]]] = [
        ("cat", DOCUMENTS),
        ("dog", ["", "dog"]),
        ("cat", []),
        ("mat", DOCUMENTS[::-1]),
    ]
    rankings = make().rerank_batch(tasks, top_n=2, explain=True)
    assert len(backend.batches) == 1
    single = make()
    assert rankings == [single.rerank(q, d, top_n=2, explain=True) for q, d in tasks]


def test_an_empty_batch(make: Make, backend: FakeBackend) -> None:
    assert make().rerank_batch([]) == []
    assert not backend.batches


@pytest.mark.parametrize("task", ["ab", ("cat",), ("cat", [], 1), None, {"cat": 1, "b": 2}])
def test_a_task_that_is_no_pair_is_named(make: Make, task: Any) -> None:
    with pytest.raises(TypeError, match=r"task 1 is not a \(query, documents\) pair"):
        make().rerank_batch([("cat", DOCUMENTS), task])


def test_errors_in_a_batch_name_the_task(make: Make) -> None:
    with pytest.raises(TypeError, match="document 0 is int") as caught:
        make().rerank_batch([("cat", DOCUMENTS), ("dog", [3])])
    assert caught.value.__notes__ == ["in task 1 of the batch"]
    with pytest.raises(PromptError) as too_long:
        make().rerank_batch([("cat", DOCUMENTS), ("dog " * 9999, ["a"])])
    assert too_long.value.__notes__ == ["in task 1 of the batch"]


def test_progress_reaches_the_backend(make: Make, backend: FakeBackend) -> None:
    seen = []
    capture = backend.capture
    backend.capture = lambda requests, *, progress=False: (  # type: ignore[method-assign]
        seen.append(progress) or capture(requests)
    )
    make().rerank_batch([("cat", DOCUMENTS)], progress=True)
    assert seen == [True]


def test_a_documents_null_pass_is_computed_once(make: Make, backend: FakeBackend) -> None:
    reranker = make()
    first = reranker.rerank("cat", DOCUMENTS)
    reranker.rerank("dog", [*DOCUMENTS, "new"])
    again = reranker.rerank("cat", DOCUMENTS)
    assert [len(batch) for batch in backend.batches] == [8, 6, 4]
    assert len(null_requests(backend)) == 5
    assert again == first


def test_listwise_null_passes_are_remembered_too(make: Make, backend: FakeBackend) -> None:
    reranker = make(window="all")
    for query in ("cat", "dog"):
        reranker.rerank(query, DOCUMENTS)
    assert [len(batch) for batch in backend.batches] == [2, 1]


def test_asking_the_null_query_itself(make: Make) -> None:
    ranking = make().rerank(NULL_QUERY, DOCUMENTS)
    assert [(item.index, item.score) for item in ranking] == [(i, 0.0) for i in range(4)]


def test_a_query_and_its_null_pass_are_neighbours(make: Make, backend: FakeBackend) -> None:
    make().rerank("cat", DOCUMENTS)
    ids = [r.prompt_token_ids for r in backend.batches[0]]
    for query, null in zip(ids[::2], ids[1::2], strict=True):
        end = backend.batches[0][0].probe.spans[0][1]
        assert query[:end] == null[:end]


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"window": 0}, ValueError, "window must be 'all' or a whole number"),
        ({"window": "some"}, ValueError, "window must be 'all' or a whole number"),
        ({"strategy": "best"}, ValueError, "strategy must be one of core, icr, qr, not 'best'"),
        ({"calibrate": 1}, TypeError, "calibrate must be True or False"),
        ({"max_tokens_per_doc": 0}, ValueError, "max_tokens_per_doc must be a whole number from 1"),
        (
            {"backend": "jax"},
            ValueError,
            "backend must be one of vllm, vllm-async, transformers",
        ),
        ({"backend": object()}, TypeError, "backend must be one of vllm, vllm-async, transformers"),
        ({"heads": []}, ValueError, "heads must name at least one head"),
        ({"heads": ["0-1", (0, 1)]}, ValueError, "none twice"),
        ({"heads": "0-1"}, TypeError, "heads must be a HeadSet or a list such as"),
        ({"heads": ["x"]}, ProbeError, "not a head: 'x'"),
        ({"heads": ["4-0"]}, ProbeError, "head 4-0 does not exist in test/fake"),
        ({"heads": None}, HeadSetError, "no head set is known for test/fake"),
        ({"config": "heads.yaml"}, ValueError, "heads and config both name the heads"),
        ({"strategy": "icr"}, ValueError, "strategy 'icr' reads every head"),
        ({"dtype": "float32"}, TypeError, "dtype cannot be set on a backend that is already run"),
    ],
)
def test_bad_settings(
    make: Make, setting: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(**setting)


def head_set(**changes: Any) -> HeadSet:
    fields = {
        "model": "test/fake",
        "num_layers": 4,
        "num_heads": 3,
        "heads": ("1-2", "0-1"),
        "method": "core",
        "window": 2,
    }
    return HeadSet(**(fields | changes))


def test_a_head_set_brings_heads_and_window(make: Make, tmp_path: Any) -> None:
    reranker = make(heads=head_set(), window=None)
    assert reranker.heads == (Head(1, 2), Head(0, 1))
    assert reranker.window == 2
    assert reranker.head_set == head_set()
    assert make(heads=head_set(), window="all").window == "all"
    assert make(window=None).window == "all"
    head_set().to_yaml(tmp_path / "heads.yaml")
    from_file = make(heads=None, config=tmp_path / "heads.yaml", window=None)
    assert from_file.head_set == head_set()


def test_a_head_sets_weights_weigh_its_heads(make: Make, backend: FakeBackend) -> None:
    weighted = head_set(weights=(2.0, 0.25), window=1)
    (item,) = make(heads=weighted, calibrate=False).rerank("cat mat", DOCUMENTS[:1], explain=True)
    request = backend.batches[-1][0]
    one, other = (
        shared_tokens(request, head).astype(np.float32).astype(np.float64)
        for head in (Head(1, 2), Head(0, 1))
    )
    assert item.token_scores is not None
    found = [token.score for token in item.token_scores]
    assert found == pytest.approx((2.0 * one + 0.25 * other).tolist())
    calibrated = make(heads=weighted).rerank("cat mat", DOCUMENTS)
    again = make(heads=head_set(heads=("0-1", "1-2"), weights=(0.25, 2.0), window=1))
    assert [d.score for d in again.rerank("cat mat", DOCUMENTS)] == pytest.approx(
        [d.score for d in calibrated]
    )
    plain = make(heads=head_set(window=1)).rerank("cat mat", DOCUMENTS)
    assert [d.score for d in plain] != pytest.approx([d.score for d in calibrated])


def test_weights_do_not_reach_a_strategy_that_reads_every_head(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = make(heads=None, strategy="icr").rerank("cat mat", DOCUMENTS)
    packaged = head_set(weights=(100.0, 1.0))
    monkeypatch.setattr("core_rerank.settings.find_head_set", lambda _: packaged)
    beside = make(heads=None, strategy="icr").rerank("cat mat", DOCUMENTS)
    assert [d.score for d in beside] == [d.score for d in every]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "test/other"}, "the head set is for test/other, not for test/fake"),
        ({"num_layers": 5}, "with 5 layers of 3 heads, but test/fake has 4 layers of 3"),
        ({"num_heads": 9}, "with 4 layers of 9 heads, but test/fake has 4 layers of 3"),
    ],
)
def test_a_head_set_of_another_model_is_refused(
    make: Make, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeadSetError, match=message):
        make(heads=head_set(**changes))


def test_heads_beyond_the_kept_layers_are_refused(tokenizer: Any) -> None:
    backend = FakeBackend(tokenizer, layers_kept=1)
    for heads in (head_set(), ["1-2"]):
        with pytest.raises(ProbeError, match="head 1-2 lies beyond the 1 layers kept of 4"):
            Reranker(backend=backend, heads=heads)


@pytest.mark.parametrize("weights", [None, (2.0, 0.25)])
def test_a_backend_that_returns_something_else_is_caught(
    make: Make, backend: FakeBackend, weights: tuple[float, ...] | None
) -> None:
    reranker = make(heads=head_set(weights=weights))
    for wrong in (
        lambda c: Capture(c.heads, c.values[:, 1:]),
        lambda c: Capture(c.heads[:1], c.values[:1]),
        lambda c: Capture(c.heads[::-1], c.values),
    ):
        backend._capture = lambda request, wrong=wrong: wrong(  # type: ignore[method-assign]
            FakeBackend._capture(backend, request)
        )
        with pytest.raises(IncompleteCaptureError, match="the fake backend returned attention"):
            reranker.rerank("cat", DOCUMENTS)


def test_rankings_are_json_safe(make: Make) -> None:
    ranking = make().rerank("cat", [*DOCUMENTS, ""], doc_ids=["a", 2, "c", 4, "e"], explain=True)
    assert json.loads(json.dumps(ranking.to_dict(), allow_nan=False)) == ranking.to_dict()


def test_a_rerank_may_cut_documents_shorter_but_not_longer(make: Make) -> None:
    reranker = make(max_tokens_per_doc=8)
    long, short = "cat mat dog " * 10, "cat"
    assert [item.truncated for item in reranker.rerank("cat", [short])] == [False]

    def tokens_read(limit: int | None) -> int:
        (item,) = reranker.rerank("cat", [long], explain=True, max_tokens_per_doc=limit)
        assert item.truncated
        return len(item.token_scores or ())

    assert [tokens_read(limit) for limit in (None, 3, 8, 100)] == [8, 3, 8, 8]
    assert reranker.max_tokens_per_doc == 8
    for wrong in (0, -1, True, 2.5, "3"):
        with pytest.raises(ValueError, match="max_tokens_per_doc must be a whole number from 1"):
            reranker.rerank("cat", [long], max_tokens_per_doc=wrong)


def test_a_ranking_counts_the_tokens_of_its_prompts(make: Make) -> None:
    reranker = make(window=1)
    one = reranker.rerank("cat", ["mat dog"]).prompt_tokens
    two = reranker.rerank("cat", ["mat dog", "", "mat dog"]).prompt_tokens
    assert 30 < one < 100
    assert two == 2 * one
    assert reranker.rerank("cat", []).prompt_tokens == 0


def test_health(make: Make, backend: FakeBackend, tokenizer: Any) -> None:
    reranker = make()
    reranker.check_health()
    assert not reranker.shares_batches
    reranker.close()
    with pytest.raises(ClosedError):
        reranker.check_health()
    shared = SharedFakeBackend(tokenizer)
    reranker = Reranker(backend=shared, heads=["1-2"])
    reranker.check_health()
    assert reranker.shares_batches
    shared.dead = True
    with pytest.raises(EngineDeadError):
        reranker.check_health()
