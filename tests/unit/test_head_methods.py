"""Choosing heads: each method finds what was planted, whatever the order; greedy gains by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from core_rerank.head_methods import METHODS, Choice, Evidence, Method, choose, head_scores
from core_rerank.head_validation import held_out, stability
from core_rerank.head_weights import ListwiseProblem, sparse_path
from hook_runtime.specs import Head

LAYERS, HEADS = 6, 4
STRONG, PARTNER = Head(2, 1), Head(4, 3)


def noise(queries: int = 60, documents: int = 8, seed: int = 0) -> np.ndarray:
    shape = (queries, documents, LAYERS, HEADS)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32) / 10


def evidence(values: np.ndarray, temperature: float = 0.1, seed: int = 0) -> Evidence:
    """The first document of each query is its positive."""
    positive = np.zeros(values.shape[:2], bool)
    positive[:, 0] = True
    ids = tuple(f"q{i}" for i in range(len(values)))
    return Evidence(values, positive, ids, temperature, seed)


def planted(seed: int = 0) -> Evidence:
    """One head sees the positive of even queries, the other that of odd ones."""
    values = noise(seed=seed)
    values[::2, 0, STRONG.layer, STRONG.head] += 1.0
    values[1::2, 0, PARTNER.layer, PARTNER.head] += 0.9
    return evidence(values)


def every(given: Evidence) -> range:
    return range(len(given.query_ids))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_planted_heads(method: Method) -> None:
    given = planted()
    choice = choose(method, given, every(given), [2])[2]
    assert set(choice.heads) == {STRONG, PARTNER}
    assert (choice.weights is not None) == (method in ("weighted", "signed"))
    ndcg, reciprocal = given.ranked(choice, every(given))
    assert ndcg.mean() > 0.95
    assert reciprocal.mean() > 0.95
    assert {
        Head(*divmod(int(i), HEADS)) for i in np.argsort(-head_scores(method, given).ravel())[:2]
    } == {STRONG, PARTNER}


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_queries_and_documents_does_not_matter(method: Method) -> None:
    given = planted(seed=3)
    generator = np.random.default_rng(1)
    queries = generator.permutation(len(given.query_ids))
    documents = generator.permutation(given.values.shape[1])
    moved = dataclasses.replace(
        given,
        values=given.values[queries][:, documents],
        positive=given.positive[queries][:, documents],
        query_ids=tuple(given.query_ids[i] for i in queries),
    )
    counts = [1, 2, 5, 9]
    expected = choose(method, given, every(given), counts)
    found = choose(method, moved, every(moved), counts)
    for count in counts:
        assert found[count].heads == expected[count].heads
        if expected[count].weights is not None:
            assert found[count].weights == pytest.approx(expected[count].weights, rel=1e-2)
    assert held_out(method, moved, [2])[2].mrr == pytest.approx(held_out(method, given, [2])[2].mrr)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_counts_give_the_same_heads(method: Method) -> None:
    given = planted(seed=5)
    together = choose(method, given, every(given), [1, 3, 8])
    for count in (1, 3, 8):
        assert choose(method, given, every(given), [count])[count] == together[count]


@pytest.mark.parametrize("method", METHODS)
def test_one_query_is_enough_to_choose(method: Method) -> None:
    given = evidence(noise(queries=1))
    assert len(choose(method, given, [0], [1])[1].heads) == 1
    assert held_out(method, given, [1]) == {}
    assert stability(method, given, 1) is None


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method: Method) -> None:
    given = planted()
    padding = np.full((len(given.values), 3, LAYERS, HEADS), np.nan, np.float32)
    padded = dataclasses.replace(
        given,
        values=np.concatenate([given.values, padding], axis=1),
        positive=np.pad(given.positive, ((0, 0), (0, 3))),
    )
    assert choose(method, padded, every(given), [3]) == choose(method, given, every(given), [3])
    assert np.allclose(head_scores(method, padded), head_scores(method, given))


@pytest.mark.parametrize("method", METHODS)
def test_heads_that_say_nothing_are_chosen_by_layer_and_head(method: Method) -> None:
    given = evidence(np.zeros((30, 5, LAYERS, HEADS), np.float32))
    choice = choose(method, given, every(given), [3])[3]
    assert choice == Choice((Head(0, 0), Head(0, 1), Head(0, 2)))


def test_qr_counts_attention_whatever_the_negatives_get() -> None:
    values = noise()
    values[:, :, 5, 2] += 3.0
    given = evidence(values)
    assert choose("qr", given, every(given), [1])[1].heads == (Head(5, 2),)
    assert choose("core", given, every(given), [1])[1].heads != (Head(5, 2),)


def test_greedy_takes_the_head_that_adds_most_not_the_second_best() -> None:
    """Two heads see the even queries, one the odd: the best pair is one of each."""
    values = np.zeros((40, 5, LAYERS, HEADS), np.float32)
    values[:30, 0, 1, 0] = 1.0
    values[:28, 0, 1, 1] = 1.0
    values[30:, 0, 3, 3] = 1.0
    given = evidence(values)
    order = np.random.default_rng(0).permutation(40)
    given = dataclasses.replace(given, values=values[order])
    assert choose("core", given, every(given), [2])[2].heads == (Head(1, 0), Head(1, 1))
    assert choose("ndcg", given, every(given), [2])[2].heads == (Head(1, 0), Head(3, 3))


@pytest.mark.parametrize("method", ["weighted", "signed"])
def test_weights_undo_a_difference_of_scale(method: Method) -> None:
    """A head a thousand times as loud, and no better, must not drown the other."""
    values = noise(queries=200)
    values[:, 0, STRONG.layer, STRONG.head] += 0.1
    values[:, 0, PARTNER.layer, PARTNER.head] += 0.1
    values[..., PARTNER.layer, PARTNER.head] *= 1000
    given = evidence(values)
    choice = choose(method, given, every(given), [2])[2]
    assert choice.weights is not None
    weights = dict(zip(choice.heads, choice.weights, strict=True))
    assert weights[STRONG] / weights[PARTNER] == pytest.approx(1000, rel=0.4)
    assert np.mean(choice.weights) == pytest.approx(1, abs=1e-3)
    plain = Choice((STRONG, PARTNER))
    assert (
        given.ranked(choice, every(given))[0].mean() > given.ranked(plain, every(given))[0].mean()
    )


@pytest.mark.parametrize("method", ["weighted", "signed"])
def test_weights_use_no_more_heads_than_allowed(method: Method) -> None:
    given = evidence(noise(seed=8))
    for count in (1, 2, 3, 6):
        choice = choose(method, given, every(given), [count])[count]
        assert 1 <= len(choice.heads) <= count
        assert choice.weights is not None
        assert min(choice.weights) > 0 or method == "signed"


def test_signed_weights_take_away_what_a_document_attracts_whatever_is_asked() -> None:
    """One head sees relevance and salience, another salience alone: their difference tells."""
    generator = np.random.default_rng(1)
    values = noise(queries=80)
    salience = generator.random(values.shape[:2])
    values[:, 0, STRONG.layer, STRONG.head] += 0.2
    values[..., STRONG.layer, STRONG.head] += salience
    values[..., PARTNER.layer, PARTNER.head] += salience
    given = evidence(values)
    signed = choose("signed", given, every(given), [2])[2]
    assert signed.weights is not None
    weights = dict(zip(signed.heads, signed.weights, strict=True))
    assert weights[STRONG] == pytest.approx(-weights[PARTNER], rel=0.3)
    assert abs(np.array(signed.weights)).mean() == pytest.approx(1, abs=1e-3)
    weighted = choose("weighted", given, every(given), [2])[2]
    gain = given.ranked(signed, every(given))[0] - given.ranked(weighted, every(given))[0]
    assert gain.mean() > 0.1


def test_the_gradient_is_that_of_the_loss() -> None:
    given = planted()
    values = given.values.reshape(*given.values.shape[:2], -1)
    positive = given.positive.copy()
    positive[:, 1] = True
    problem, _ = ListwiseProblem.of(values, positive)
    weights = np.random.default_rng(0).random(LAYERS * HEADS)

    def loss(weights: np.ndarray) -> float:
        total = 0.0
        for features, good, bad in zip(
            problem.features.astype(float), problem.positive, problem.negative, strict=True
        ):
            scores = features @ weights
            ratios = [np.exp(s) / (np.exp(s) + np.exp(scores[bad]).sum()) for s in scores[good]]
            total -= np.log(ratios).mean()
        return total / len(problem.features)

    step = 1e-4
    numeric = [
        (loss(weights + step * axis) - loss(weights - step * axis)) / (2 * step)
        for axis in np.eye(LAYERS * HEADS)
    ]
    assert problem.gradient(weights) == pytest.approx(numeric, abs=1e-5)


def test_the_path_starts_empty_and_ends_where_nothing_is_to_be_gained() -> None:
    given = planted()
    values = given.values.reshape(*given.values.shape[:2], -1)
    problem, _ = ListwiseProblem.of(values, given.positive)
    path = list(sparse_path(problem, most=LAYERS * HEADS))
    sizes = [int((weights > 0).sum()) for weights in path]
    assert sizes[0] <= 2
    steepest = -problem.gradient(np.zeros(LAYERS * HEADS)).min()
    slope = problem.gradient(path[-1])
    penalty = 0.01 * steepest
    assert (slope >= -penalty * 1.01).all()
    assert slope[path[-1] > 0] == pytest.approx(-penalty, rel=0.05)


@pytest.mark.parametrize(
    ("method", "count", "message"),
    [
        ("core", 25, "cannot choose 25 heads of 24: core chooses 1 to 24"),
        ("qr", 0, "cannot choose 0 heads of 24"),
        ("best", 1, "method must be one of core, qr, ndcg, weighted, signed, not 'best'"),
    ],
)
def test_impossible_choices_are_refused(method: Method, count: int, message: str) -> None:
    given = planted()
    with pytest.raises(ValueError, match=message):
        choose(method, given, every(given), [count])


def test_only_the_pool_is_tried() -> None:
    values = np.zeros((3, 2, 20, 8), np.float32)
    given = evidence(values)
    assert len(choose("core", given, every(given), [160])[160].heads) == 160
    for method in ("ndcg", "weighted"):
        with pytest.raises(ValueError, match=f"{method} chooses 1 to 128"):
            choose(method, given, every(given), [129])


# ---------------------------------------------------------------- validation


def test_held_out_quality_is_not_that_of_the_queries_seen() -> None:
    """On pure noise the best of many heads looks good on what it was chosen on, only there."""
    given = evidence(noise(queries=40, documents=10, seed=2))
    choice = choose("ndcg", given, every(given), [4])[4]
    seen = given.ranked(choice, every(given))[0].mean()
    unseen = held_out("ndcg", given, [4])[4].ndcg_at_10
    assert seen > unseen + 0.1


def test_disjoint_samples_agree_on_planted_heads_and_not_on_noise() -> None:
    given = planted()
    found = stability("core", given, 2)
    assert found is not None
    assert (found.samples, found.queries, found.overlap, found.lowest) == (3, 20, 1.0, 1.0)
    loose = stability("core", evidence(noise()), 2)
    assert loose is not None
    assert loose.overlap < 0.5


def test_samples_are_disjoint_and_follow_the_ids() -> None:
    given = planted()
    parts = given.deal(3)
    assert sorted(row for part in parts for row in part) == list(every(given))
    assert parts == given.deal(3, list(every(given))[::-1])
    assert parts != dataclasses.replace(given, seed=1).deal(3)
    few = evidence(noise(queries=15))
    assert stability("core", few, 2) is None
    two = stability("core", evidence(noise(queries=16)), 2)
    assert two is not None
    assert two.samples == 2
