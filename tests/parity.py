"""What "exact" means in the tests: close to the reference, and the same ranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hook_runtime.specs import Capture, CaptureRequest

FLOAT32_TOLERANCE = 1e-4
HEAD_TOLERANCE = 1e-3


def relative_error(got: np.ndarray, reference: np.ndarray) -> float:
    """Largest absolute difference over the largest reference value."""
    assert got.shape == reference.shape
    assert got.dtype == np.float32
    return float(np.abs(got - reference).max() / np.abs(reference).max())


def ranking(values: np.ndarray, request: CaptureRequest) -> list[int]:
    """The spans from most to least attention per token, summed over heads."""
    scores, column = [], 0
    for start, end in request.probe.spans:
        width = end - start if request.probe.reduction == "tokens" else 1
        mass = values[:, column : column + width].astype(np.float64).sum()
        scores.append(mass / (end - start))
        column += width
    return [int(i) for i in np.argsort(np.negative(scores), kind="stable")]


def _assert_every_head(got: np.ndarray, reference: np.ndarray, place: int) -> None:
    """A head that looks elsewhere has small values, which the largest of all would excuse."""
    errors = np.abs(got - reference).max(axis=1)
    allowed = HEAD_TOLERANCE * np.abs(reference).max(axis=1) + 1e-8
    worst = int((errors / allowed).argmax())
    assert errors[worst] <= allowed[worst], (
        f"request {place}: head {worst} is off by {errors[worst]:.2e}, {allowed[worst]:.2e} allowed"
    )


def assert_exact(
    captures: Sequence[Capture | None],
    references: Sequence[np.ndarray],
    requests: Sequence[CaptureRequest],
    tolerance: float = FLOAT32_TOLERANCE,
) -> None:
    """Each capture is within ``tolerance`` of its reference and ranks the spans alike."""
    assert len(captures) == len(references) == len(requests)
    for place, (capture, reference, request) in enumerate(
        zip(captures, references, requests, strict=True)
    ):
        assert capture is not None, f"request {place} has no capture"
        error = relative_error(capture.values, reference)
        assert error <= tolerance, f"request {place}: relative error {error:.2e}"
        if tolerance == FLOAT32_TOLERANCE:
            _assert_every_head(capture.values, reference, place)
        assert ranking(capture.values, request) == ranking(reference, request)
        if request.probe.heads != "all":
            assert capture.heads == request.probe.heads
