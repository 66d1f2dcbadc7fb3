"""How `Reranker` ranks: scores, strategies, batches, the null memory, settings and head sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_backend import DOCUMENTS, FakeBackend, Make, SharedFakeBackend, shared_tokens

from core_rerank import ClosedError, HeadSet, HeadSetError, Reranker
from core_rerank.prompt import NULL_QUERY, PromptError
from hook_runtime.errors import EngineDeadError, IncompleteCaptureError, ProbeError
from hook_runtime.specs import Capture, CaptureRequest, Head


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


@pytest.mark.parametrize(
    "how",
    [
        {"calibrate": False},
        {"calibrate": False, "window": "all"},
        {"calibrate": False, "strategy": "icr", "heads": None},
        {"calibrate": False, "weighted": True},
        {"calibrate": True},
    ],
)
def test_each_heads_part_of_every_token(make: Make, backend: FakeBackend, how: Any) -> None:
    if how.pop("weighted", False):
        how["heads"] = head_set(weights=(2.0, -0.25), window=1)
    reranker = make(**how)
    plain = reranker.rerank("cat mat", [*DOCUMENTS, " "], explain=True)
    ranking = reranker.rerank("cat mat", [*DOCUMENTS, " "], explain="heads")
    scores = {d.index: d.score for d in plain}
    assert {d.index: d.score for d in ranking} == pytest.approx(scores, rel=1e-6, abs=1e-6)
    assert plain[0].head_scores is None
    every = [f"{layer}-{head}" for layer in range(4) for head in range(3)]
    names = every if how.get("strategy") == "icr" else ["1-2", "0-1"]
    in_order = [sorted(r, key=lambda d: d.index) for r in (ranking, plain)]
    for one, other in zip(*in_order, strict=True):
        assert one.head_scores is not None
        assert one.token_scores is not None
        if one.blank:
            assert one.head_scores == {}
            continue
        assert list(one.head_scores) == names
        assert {len(scores) for scores in one.head_scores.values()} == {len(one.token_scores)}
        sums = np.sum(list(one.head_scores.values()), axis=0)
        expected = [token.score for token in other.token_scores or ()]
        assert (sums.tolist() == pytest.approx(expected)) == (how["calibrate"] is False)
    assert json.loads(json.dumps(ranking.to_dict()))["documents"][0]["head_scores"].keys() == {
        *names
    }
    assert "head_scores" not in plain.to_dict()["documents"][0]


def test_an_explanation_that_there_is_not(make: Make) -> None:
    with pytest.raises(ValueError, match="explain must be True, False or 'heads', not 'tokens'"):
        make().rerank("cat", DOCUMENTS, explain="tokens")


def test_the_qr_strategy_keeps_every_token(make: Make) -> None:
    ranking = make(strategy="qr").rerank("cat", ["cat " * 30 + "dog"], explain=True)
    assert all(token.kept for token in ranking[0].token_scores or ())


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
        ({"calibrate": 1}, TypeError, "calibrate must be True, False or None"),
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


def test_a_head_set_says_whether_to_calibrate(make: Make, backend: FakeBackend) -> None:
    raw = make(heads=head_set(weights=(2.0, -0.5), window=1, calibrate=False))
    ranking = raw.rerank("cat mat", DOCUMENTS, explain=True)
    assert len(backend.batches[-1]) == len(DOCUMENTS)  # no null pass
    assert all(token.kept for document in ranking for token in document.token_scores or ())
    make(heads=head_set(weights=(2.0, -0.5), window=1, calibrate=False), calibrate=True).rerank(
        "cat mat", DOCUMENTS
    )
    assert len(backend.batches[-1]) == 2 * len(DOCUMENTS)


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
