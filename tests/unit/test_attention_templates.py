"""Attention probes that do not know their prompt yet: what fits some prompt, and what none."""

from __future__ import annotations

from typing import Any

import pytest

from hook_runtime.errors import ProbeError
from hook_runtime.templates import AttentionTemplate


def test_an_attention_template_fits_its_prompt() -> None:
    probe = AttentionTemplate(["1-1"], spans=((0, 4), (5, -2))).probe(12)
    assert (probe.query_span, probe.spans) == ((11, 12), ((0, 4), (5, 10)))
    assert AttentionTemplate("all").probe(5).spans == ((0, 4),)
    with pytest.raises(ProbeError, match="does not fit a prompt of 4"):
        AttentionTemplate(["1-1"], spans=((0, 9),)).probe(4)
    with pytest.raises(ProbeError, match="nothing"):
        AttentionTemplate(["1-1"]).probe(1)


SPANS = {  # whether any prompt fits
    ((0, 4), (4, 6)): True,
    ((0, 4), (5, -2)): True,
    ((0, -4), (-4, 0)): True,
    ((3, -2), (-2, -1)): True,
    ((0, -3), (5, 9)): False,
    ((0, -5), (5, 9)): True,
    ((0, -5), (5, 9), (10, 12)): False,
    ((-9, 3), (4, 0)): True,
    ((0, 4), (3, 6)): False,
    ((4, 6), (0, 4)): False,
    ((0, -3), (-4, 0)): False,
    ((0, 0), (5, 9)): False,
    ((0, 0), (-1, 0)): False,
    ((5, -3), (4, 9)): False,
    ((5, -3), (6, -3)): False,
    ((-5, 0),): True,
    ((-5, -5),): False,
    ((-3, -5),): False,
    ((9, 3),): False,
    ((3, 3),): False,
    ((9, -3),): True,
    ((-9, 3),): True,
}


@pytest.mark.parametrize(("spans", "fits"), SPANS.items())
def test_spans_that_fit_no_prompt_are_refused_without_one(spans: Any, fits: bool) -> None:
    """What some prompt of up to forty tokens fits is not refused, and nothing else is let by."""

    def made(prompt_len: int) -> bool:
        try:
            AttentionTemplate("all", (0, 1), spans).probe(prompt_len)
        except ProbeError:
            return False
        return True

    assert any(map(made, range(1, 40))) is fits
    if fits:
        AttentionTemplate("all", (0, 1), spans)
        return
    with pytest.raises(ProbeError, match=r"span|ascend"):
        AttentionTemplate("all", (0, 1), spans)


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionTemplate("all", (9, 3)),
        lambda: AttentionTemplate("all", "first"),  # type: ignore[arg-type]
        lambda: AttentionTemplate("all", (0, 4)),
        lambda: AttentionTemplate("all", spans=()),
        lambda: AttentionTemplate("all", spans="last"),  # type: ignore[arg-type]
        lambda: AttentionTemplate("all", reduction="words"),  # type: ignore[arg-type]
        lambda: AttentionTemplate("all", sum_heads=1),  # type: ignore[arg-type]
    ],
)
def test_templates_that_are_refused(make: Any) -> None:
    with pytest.raises(ProbeError):
        make()
