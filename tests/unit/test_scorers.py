"""The paged scoring, in torch and in Triton, against a dense softmax over the same vectors."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch
from scorer_cases import KINDS, largest_error

from hook_runtime import torch_scorer
from hook_runtime.shadow import Segment
from hook_runtime.torch_scorer import TorchScorer, buckets

TESTS = Path(__file__).parents[1]
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [16_000_000, 700])
def test_torch(kind: str, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_scorer.BUDGET, "cpu", budget)
    assert largest_error(TorchScorer, kind) <= 2e-6


@triton
def test_triton_in_its_interpreter() -> None:
    """The kernels' own arithmetic, run by Triton's interpreter on the CPU."""
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, str(TESTS / "scorer_cases.py")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = dict(line.split("\t") for line in done.stdout.splitlines())
    assert errors.keys() == KINDS.keys()
    assert max(map(float, errors.values())) <= 2e-6, errors


@triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-5)])
def test_triton_on_a_gpu(kind: str, dtype: torch.dtype, most: float) -> None:
    from hook_runtime.triton_scorer import TritonScorer

    assert largest_error(TritonScorer, kind, "cuda", dtype) <= most


@triton
@pytest.mark.parametrize("budget", [1, 500, 10**9])
def test_segments_by_length_come_once_each_within_the_budget(budget: int) -> None:
    from hook_runtime.triton_scorer import by_length

    segments = [Segment(0, stop, [[0]], owner=stop) for stop in (9, 400, 10, 11, 390, 8, 5000)]
    groups = list(by_length(segments, 3, budget))
    assert sorted(s.stop for g in groups for s in g) == sorted(s.stop for s in segments)
    for group in groups:
        padded = len(group) * max(s.stop for s in group)
        assert len(group) == 1 or 3 * padded <= budget
        assert padded <= 1.5 * sum(s.stop for s in group)


def test_buckets_keep_every_row_once_and_respect_the_budget() -> None:
    segments = [
        Segment(stop - rows, stop, [[0]], owner=i)
        for i, (rows, stop) in enumerate([(5, 100), (40, 4000), (5, 110), (1, 8), (300, 900)])
    ]
    heads, head_dim, budget = 4, 16, 200_000
    rows_of: dict[Any, list[int]] = {}
    for bucket in buckets(segments, heads, head_dim, budget):
        widest = max(s.stop - s.start for s in bucket)
        keys = len(bucket) * heads * max(s.stop for s in bucket)
        assert keys * widest <= budget
        assert len(bucket) == 1 or keys * 2 * head_dim <= budget
        for piece in bucket:
            rows_of.setdefault(piece.owner, []).extend(range(piece.start, piece.stop))
    for i, segment in enumerate(segments):
        assert sorted(rows_of[i]) == list(range(segment.start, segment.stop))
