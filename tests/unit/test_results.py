"""Sums on their way to the engine's side: what is added up in the worker is what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from hook_runtime.results import Results
from hook_runtime.specs import AttentionProbe, Head
from hook_runtime.tracker import ProbedRequest, columns_of

HELD = [Head(0, 1), Head(2, 0), Head(3, 5)]
SUMS = torch.rand(2, len(HELD), 9, generator=torch.Generator().manual_seed(0))
PROBE = AttentionProbe(tuple(HELD), (6, 8), ((0, 2), (3, 5)))


def _request(name: str, heads: Sequence[Head], sum_heads: bool) -> ProbedRequest:
    probe = replace(PROBE, heads=tuple(heads), sum_heads=sum_heads)
    return ProbedRequest(
        name, name, probe, np.zeros(9, np.int32), [[0]], 0, 9, b"", 2, columns=columns_of(probe)
    )


@pytest.mark.parametrize(
    ("heads", "sum_heads", "added"),
    [
        ((HELD, HELD), (True, True), True),
        ((HELD, [*HELD, Head(9, 9)]), (True, True), True),  # the last one lives on another worker
        ((HELD, HELD[:2]), (True, True), False),
        ((HELD, HELD), (True, False), False),
        ((HELD[::-1], HELD[1:]), (False, False), False),
    ],
)
def test_heads_are_added_up_where_all_of_a_bucket_want_that(
    heads: tuple[list[Head], list[Head]], sum_heads: tuple[bool, bool], added: bool
) -> None:
    results = Results()
    requests = [_request(str(i), heads[i], sum_heads[i]) for i in range(2)]
    part = results.fetch_sums(SUMS, requests, HELD)
    assert part.added == added
    assert part.values.shape == (2, 1 if added else 3, 9)
    for i, request in enumerate(requests):
        request.parts.append((part, i))
        results.finish(request, HELD)
    for i, found in enumerate(results.take(["0", "1"])):
        rows = [n for n, head in enumerate(HELD) if head in heads[i]]
        expected = SUMS[i].numpy()[rows][:, [0, 1, 3, 4]] / 2
        if sum_heads[i]:
            expected = expected.sum(axis=0, keepdims=True)
        got = np.frombuffer(found["values"], np.float32).reshape(expected.shape)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert found["heads"] == [list(HELD[n]) for n in rows]


def test_parts_of_both_kinds_make_one_sum() -> None:
    """A prompt in two chunks, the second in a step whose other request wants every head."""
    results, request = Results(), _request("0", HELD, True)
    one = results.fetch_sums(SUMS[:1], [request], HELD)
    two = results.fetch_sums(SUMS, [request, _request("1", HELD, False)], HELD)
    assert (one.added, two.added) == (True, False)
    request.parts += [(one, 0), (two, 0)]
    results.finish(request, HELD)
    (found,) = results.take(["0"])
    expected = SUMS[0].numpy()[:, [0, 1, 3, 4]].sum(axis=0)
    np.testing.assert_allclose(np.frombuffer(found["values"], np.float32), expected, rtol=1e-6)
