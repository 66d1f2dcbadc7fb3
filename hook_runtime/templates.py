"""An attention probe that does not know its prompt yet, as a config holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from .errors import ProbeError
from .specs import AttentionProbe, Head, Reduction, Span, parse_heads


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

    def probe(self, prompt_len: int) -> AttentionProbe:
        """The probe for a prompt of so many tokens; ProbeError where it does not fit."""
        query = (-1, 0) if self.query == "last" else self.query
        rows = _span(query, prompt_len)
        if self.spans == "prompt":
            if rows[0] == 0:
                raise ProbeError("spans='prompt' is what lies before the query: here, nothing.")
            spans: tuple[Span, ...] = ((0, rows[0]),)
        else:
            spans = tuple(_span(s, prompt_len) for s in self.spans)
        probe = AttentionProbe(self.heads, rows, spans, self.reduction, self.sum_heads)
        probe.check_prompt(prompt_len)
        return probe


def _span(span: tuple[int, int], prompt_len: int) -> Span:
    start, end = span
    start = start + prompt_len if start < 0 else start
    end = end + prompt_len if end <= 0 else end
    if not 0 <= start < end <= prompt_len:
        raise ProbeError(
            f"span [{span[0]}, {span[1]}] does not fit a prompt of {prompt_len} tokens."
        )
    return start, end
