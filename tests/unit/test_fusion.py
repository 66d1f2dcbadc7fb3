"""Rank fusion by hand, and what holds for any scores."""

from __future__ import annotations

import dataclasses
import doctest
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_rerank import fusion
from core_rerank.fusion import Fusion, fuse, fuse_ranks, fuse_scores, min_max, standardise
from core_rerank.types import Document, RankedDocument, Ranking

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20)


def test_the_examples() -> None:
    assert doctest.testmod(fusion).failed == 0


def test_reciprocal_rank_fusion_by_hand() -> None:
    assert fuse_ranks([9.0, 5.0, 1.0], [0.0, 0.5, 0.5]) == pytest.approx(
        [1 / 61 + 1 / 63, 1 / 62 + 1 / 61, 1 / 63 + 1 / 62]
    )


def test_standardised_scores_have_mean_zero_and_deviation_one() -> None:
    assert standardise([1.0, 3.0]) == [-1.0, 1.0]
    assert standardise([2.0, 2.0]) == [0.0, 0.0]
    assert standardise([]) == min_max([]) == []
    assert fuse_scores([1.0, 3.0], [3.0, 1.0], 0.75, "z") == [0.5, -0.5]


@given(SCORES, st.floats(0, 1))
def test_weights_at_the_ends_give_one_of_the_two(scores: list[float], weight: float) -> None:
    other = list(reversed(scores))
    assert fuse_scores(scores, other, 0) == min_max(scores)
    assert fuse_scores(scores, other, 1) == min_max(other)
    assert all(0 <= score <= 1 for score in fuse_scores(scores, other, weight))


@given(SCORES)
def test_fusing_a_ranking_with_itself_keeps_it(scores: list[float]) -> None:
    fused = Fusion().fuse(scores, scores)
    order = sorted(range(len(scores)), key=lambda place: -scores[place])
    assert sorted(range(len(scores)), key=lambda place: -fused[place]) == order


def test_what_a_user_writes() -> None:
    assert Fusion.parse("rrf") == Fusion()
    assert Fusion.parse("0.25") == Fusion(0.25)
    assert (str(Fusion()), str(Fusion(0.25))) == ("rrf", "0.25")
    assert Fusion(0.5, normalisation="z").fuse([1.0, 3.0], [3.0, 1.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fusion.parse("best"), "must be 'rrf' or the reranker's weight"),
        (lambda: Fusion.parse("1.5"), "not '1.5'"),
        (lambda: Fusion(math.nan), "between 0 and 1, not nan"),
        (lambda: Fusion(k=-1), "k must be"),
        (lambda: Fusion(normalisation="max"), "'minmax' or 'z', not 'max'"),
        (lambda: fuse_ranks([1.0], []), "one score per document: 1 and 0"),
        (lambda: fuse_scores([1.0], [math.inf], 0.5), "finite numbers, not inf"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def ranking(*scores: float) -> Ranking:
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return Ranking(
        "query",
        tuple(
            RankedDocument(index, f"d{index}", scores[index], rank, Document(f"text {index}"))
            for rank, index in enumerate(order, start=1)
        ),
        "model",
        "core",
    )


def test_a_fused_ranking_is_ordered_by_fused_scores() -> None:
    fused = fuse(ranking(0.0, 4.0, 1.0), [3.0, 2.0, 1.0], 0.25, top_n=2)
    assert [(d.doc_id, d.rank, d.score) for d in fused] == [("d0", 1, 0.75), ("d1", 2, 0.625)]
    assert fused.strategy == "core+0.25"
    assert [d.doc_id for d in fuse(ranking(0.0, 4.0, 1.0), [3.0, 2.0, 1.0])] == ["d1", "d0", "d2"]


@pytest.mark.parametrize("how", ["rrf", 0.5, Fusion(0.5, normalisation="z")])
def test_arrays_are_fused_into_plain_numbers(how: object) -> None:
    given = ranking(0.0, 4.0, 1.0)
    fused = fuse(given, np.array([3, 2, 1], np.float32), how)
    assert [d.score for d in fused] == [d.score for d in fuse(given, [3.0, 2.0, 1.0], how)]
    json.dumps(fused.to_dict(), allow_nan=False)


def test_equal_fused_scores_keep_the_order_given() -> None:
    assert [d.index for d in fuse(ranking(1.0, 2.0), [2.0, 1.0])] == [0, 1]


@pytest.mark.parametrize(
    ("scores", "how", "message"),
    [
        ([1.0], "rrf", "1 first-stage scores were given for a ranking of 2"),
        ([1.0, math.nan], "rrf", "finite"),
        ([1.0, 2.0], 1.5, "weight from 0 to 1, not '1.5'"),
        ([1.0, 2.0], "best", "'rrf' or the reranker's weight"),
    ],
)
def test_what_cannot_be_fused_is_refused(scores: list[float], how: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fuse(ranking(0.5, 0.25), scores, how)
    with pytest.raises(ValueError, match="without top_n"):
        fuse(dataclasses.replace(ranking(0.5, 0.25), documents=ranking(0.5, 0.25)[1:]), [1, 2])
