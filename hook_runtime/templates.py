"""An attention probe that does not know its prompt yet, as a config holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

from .errors import ProbeError
from .specs import AttentionProbe, Head, Reduction, Span, parse_heads

NOTHING_BEFORE = "spans='prompt' is what lies before the query: here, nothing."


@dataclass(frozen=True)
class AttentionTemplate:
    """Attention to read in any prompt.

    Attributes:
        heads: the heads, or ``"all"``.
        query: the tokens that look: ``"last"`` of the prompt, or a half-open span. Negative
            numbers count from the prompt's end, 0 as an end is the end itself.
        spans: the tokens looked at: ``"prompt"`` for all up to the query, or half-open spans.
        reduction, sum_heads: as in `AttentionProbe`.
    """

    kind: ClassVar[str] = "attention"

    heads: tuple[Head, ...] | Literal["all"]
    query: Literal["last"] | tuple[int, int] = "last"
    spans: Literal["prompt"] | tuple[tuple[int, int], ...] = "prompt"
    reduction: Reduction = "tokens"
    sum_heads: bool = False

    def __post_init__(self) -> None:
        if self.heads != "all":
            object.__setattr__(self, "heads", parse_heads(self.heads))
        if self.query != "last":
            _check_span(self.query, "query")
        if self.spans != "prompt":
            _check_spans(self.spans)
        elif self.query[0] == 0:
            raise ProbeError(NOTHING_BEFORE)
        if self.reduction not in ("tokens", "documents"):
            raise ProbeError(f"reduction must be 'tokens' or 'documents', not {self.reduction!r}.")
        if not isinstance(self.sum_heads, bool):
            raise ProbeError(f"sum_heads must be True or False, not {self.sum_heads!r}.")

    def probe(self, prompt_len: int) -> AttentionProbe:
        """The probe for a prompt of so many tokens; ProbeError where it does not fit."""
        query = (-1, 0) if self.query == "last" else self.query
        rows = _span(query, prompt_len)
        if self.spans == "prompt":
            if rows[0] == 0:
                raise ProbeError(NOTHING_BEFORE)
            spans: tuple[Span, ...] = ((0, rows[0]),)
        else:
            spans = tuple(_span(s, prompt_len) for s in self.spans)
        probe = AttentionProbe(self.heads, rows, spans, self.reduction, self.sum_heads)
        probe.check_prompt(prompt_len)
        return probe


def _check_span(span: Any, what: str) -> None:
    """Raise ProbeError for what is no span, or empty in a prompt of any length."""
    whole = (
        isinstance(span, Sequence)
        and not isinstance(span, str)
        and len(span) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) for v in span)
    )
    if not whole or not _some_prompt_fits([span]):
        raise ProbeError(
            f"{what} {span!r} is not a half-open token span: expected (start, end), start before "
            "end, negative numbers counted from the prompt's end."
        )


def _check_spans(spans: Any) -> None:
    """Raise ProbeError for spans that overlap or descend in a prompt of any length."""
    if isinstance(spans, str) or not isinstance(spans, Sequence) or not spans:
        raise ProbeError(f"spans must be 'prompt' or a list of spans, not {spans!r}.")
    for span in spans:
        _check_span(span, "span")
    if not _some_prompt_fits(spans):
        raise ProbeError(f"spans must ascend without overlap, and in no prompt do {list(spans)}.")


def _some_prompt_fits(spans: Sequence[Any]) -> bool:
    """Whether there is a length of the prompt with which these spans lie in it, in this order.

    A place is ``a`` or, from the end, ``length + a``: that one comes before another bounds the
    length from below or above, or holds whatever it is.
    """
    places = [(0, False)]
    for start, end in spans:
        places += [(start, start < 0), (end, end <= 0)]
    places.append((0, True))
    shortest, longest = 1, math.inf
    for i, ((a, a_from_end), (b, b_from_end)) in enumerate(pairwise(places)):
        room = b - a - i % 2  # a span, at odd places, is not empty
        if a_from_end == b_from_end and room < 0:
            return False
        if b_from_end and not a_from_end:
            shortest = max(shortest, -room)
        if a_from_end and not b_from_end:
            longest = min(longest, room)
    return shortest <= longest


def _span(span: tuple[int, int], prompt_len: int) -> Span:
    start, end = span
    start = start + prompt_len if start < 0 else start
    end = end + prompt_len if end <= 0 else end
    if not 0 <= start < end <= prompt_len:
        raise ProbeError(
            f"span [{span[0]}, {span[1]}] does not fit a prompt of {prompt_len} tokens."
        )
    return start, end
