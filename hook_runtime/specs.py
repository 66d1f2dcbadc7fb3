"""What a request asks of the runtime (`AttentionProbe`) and what it gets back (`Capture`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .errors import ProbeError

if TYPE_CHECKING:
    import numpy as np

Span = tuple[int, int]
Reduction = Literal["tokens", "documents"]
PROBE_VERSION = 2


class Head(NamedTuple):
    """One attention head, both numbers from zero; written ``"15-7"`` (layer 15, head 7)."""

    layer: int
    head: int

    @classmethod
    def parse(cls, value: object) -> Head:
        """Read ``"15-7"``, ``(15, 7)``, ``[15, 7]`` or a ``Head``; ProbeError otherwise."""
        if type(value) is cls and _are_natural(value):  # a rerank reads hundreds, each one known
            return value
        if isinstance(value, str):
            parts: Sequence[object] = value.strip().split("-")
            if len(parts) == 2 and all(isinstance(p, str) and p.isdecimal() for p in parts):
                return cls(int(str(parts[0])), int(str(parts[1])))
        elif (
            isinstance(value, Sequence)
            and len(value) == 2
            and all(isinstance(p, int) and not isinstance(p, bool) and p >= 0 for p in value)
        ):
            return cls(int(value[0]), int(value[1]))
        raise ProbeError(
            f"not a head: {value!r}. Expected 'LAYER-HEAD' such as '15-7', or a pair (15, 7), "
            "both counted from zero."
        )

    def __str__(self) -> str:
        return f"{self.layer}-{self.head}"


def _are_natural(numbers: tuple[Any, ...]) -> bool:
    return all(type(n) is int and n >= 0 for n in numbers)


def as_span(value: object) -> Span | None:
    """A half-open token span (start, end), 0 <= start < end; None for anything else."""
    if type(value) is tuple and _are_natural(value) and len(value) == 2 and value[0] < value[1]:
        return value
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) == 2
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
        and 0 <= value[0] < value[1]
    ):
        return int(value[0]), int(value[1])
    return None


def _span(value: object, what: str) -> Span:
    span = as_span(value)
    if span is None:
        raise ProbeError(
            f"{what} {value!r} is not a half-open token span: expected (start, end), "
            "0 <= start < end."
        )
    return span


def parse_heads(value: Any) -> tuple[Head, ...]:
    """Heads as ``Head.parse`` reads them; ProbeError where there are none, or one comes twice."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ProbeError(f"heads must be a list of heads such as ['15-7'], not {value!r}.")
    heads = tuple(Head.parse(h) for h in value)
    if not heads:
        raise ProbeError("heads is empty: name at least one head, such as '15-7'.")
    if len(set(heads)) != len(heads):
        raise ProbeError(f"a head is named twice in {' '.join(map(str, heads))}.")
    return heads


def parse_layers(value: Any) -> tuple[int, ...] | Literal["all"]:
    """``"all"``, a layer number or several; ProbeError where there are none, or one comes twice."""
    if value == "all":
        return "all"
    given = [value] if isinstance(value, int) else value
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ProbeError(f"layers must be 'all' or a list of numbers, not {value!r}.")
    layers = tuple(given)
    if not layers:
        raise ProbeError("layers is empty: name at least one, or 'all'.")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ProbeError(f"not a layer: {layer!r}. Expected a number, counted from zero.")
    if len(set(layers)) != len(layers):
        raise ProbeError(f"a layer is named twice in {list(layers)}.")
    return layers


@dataclass(frozen=True, slots=True)
class AttentionProbe:
    """Which attention to read during one request's prefill; the generation is untouched.

    Attributes:
        heads: the heads to read, or ``"all"`` for every head of every layer. ``"all"`` does not
            read the prefix cache and needs the whole prompt in one prefill chunk.
        query_span: half-open token span of the rows (the tokens that look).
        spans: half-open, ascending, non-overlapping token spans of the columns (the tokens that
            are looked at): one per document.
        reduction: ``"tokens"`` keeps one value a token, ``"documents"`` sums each span.
        sum_heads: add the heads up where they are captured, which leaves one row to bring back.

    A value is the attention probability averaged over the query rows,
    ``1/|Q| * sum_{i in Q} softmax_j(...)`` (the inner term of eq. 1 in ICR, arXiv 2410.02642),
    with the softmax in float32 over every key the row sees.
    """

    heads: tuple[Head, ...] | Literal["all"]
    query_span: Span
    spans: tuple[Span, ...]
    reduction: Reduction = "tokens"
    sum_heads: bool = False

    def __post_init__(self) -> None:
        if self.heads != "all":
            object.__setattr__(self, "heads", parse_heads(self.heads))
        object.__setattr__(self, "query_span", _span(self.query_span, "query_span"))
        if isinstance(self.spans, str) or not isinstance(self.spans, Iterable):
            raise ProbeError(f"spans must be a list of spans, not {self.spans!r}.")
        spans = tuple(_span(s, "span") for s in self.spans)
        if not spans:
            raise ProbeError("spans is empty: name at least one span of tokens to look at.")
        for left, right in zip(spans, spans[1:], strict=False):
            if right[0] < left[1]:
                raise ProbeError(
                    f"spans must ascend without overlap, but {left} is before {right}."
                )
        object.__setattr__(self, "spans", spans)
        if self.reduction not in ("tokens", "documents"):
            raise ProbeError(f"reduction must be 'tokens' or 'documents', not {self.reduction!r}.")
        if not isinstance(self.sum_heads, bool):
            raise ProbeError(f"sum_heads must be True or False, not {self.sum_heads!r}.")

    @property
    def num_columns(self) -> int:
        """Values per head: the tokens in all spans, or the number of spans."""
        if self.reduction == "documents":
            return len(self.spans)
        return sum(end - start for start, end in self.spans)

    def check_prompt(self, prompt_len: int) -> None:
        """Raise ProbeError unless every span lies within a prompt of ``prompt_len`` tokens."""
        end = max(self.query_span[1], self.spans[-1][1])
        if end > prompt_len:
            raise ProbeError(
                f"a span ends at token {end}, but the prompt has only {prompt_len} tokens."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings, for ``SamplingParams.extra_args``."""
        return {
            "version": PROBE_VERSION,
            "heads": "all" if self.heads == "all" else [list(h) for h in self.heads],
            "query_span": list(self.query_span),
            "spans": [list(s) for s in self.spans],
            "reduction": self.reduction,
            "sum_heads": self.sum_heads,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AttentionProbe:
        """Inverse of ``to_json``; validates as the constructor does."""
        if not isinstance(data, Mapping) or data.get("version") != PROBE_VERSION:
            raise ProbeError(
                f"not a probe of version {PROBE_VERSION}: {data!r:.80}. Use to_json(), and the "
                "same release of core-rerank on both sides."
            )
        try:
            return cls(**{name: data[name] for name in cls.__dataclass_fields__})
        except KeyError as error:
            raise ProbeError(f"the probe has no {error}: it was not made by to_json().") from error


def reduce_values(values: np.ndarray, probe: AttentionProbe) -> np.ndarray:
    """Apply the probe's reductions to float32 [heads, tokens]: [heads or 1, tokens or spans]."""
    import numpy as np

    if probe.sum_heads:
        values = values.sum(axis=0, keepdims=True, dtype=np.float64).astype(np.float32)
    if probe.reduction == "tokens":
        return values
    widths = [end - start for start, end in probe.spans]
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return np.add.reduceat(values, starts, axis=1)


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """One prompt, as token ids, and the probe to read while it is prefilled."""

    prompt_token_ids: tuple[int, ...]
    probe: AttentionProbe

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", tuple(self.prompt_token_ids))
        self.probe.check_prompt(len(self.prompt_token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """The attention one request's probe asked for.

    Attributes:
        heads: those read, in the probe's order (layer-major for ``"all"``).
        values: float32 [heads, columns], or [1, columns] of their sums with ``sum_heads``; see
            ``AttentionProbe`` for what a value and a column are.
        cached_tokens: prompt tokens that came from the prefix cache.
        recomputed: the request was run again because its cached prefix had not been captured.
    """

    heads: tuple[Head, ...]
    values: np.ndarray
    cached_tokens: int = 0
    recomputed: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a backend runs: enough to check heads, budget prompts and write provenance."""

    name: str
    revision: str | None
    num_layers: int
    layers_kept: int
    num_heads: int
    max_model_len: int
    dtype: str
    device: str
    backend: str

    def check_heads(self, heads: Iterable[Head]) -> None:
        """Raise ProbeError for a head the model does not have or the kept layers do not reach."""
        for head in heads:
            if head.layer >= self.num_layers or head.head >= self.num_heads:
                raise ProbeError(
                    f"head {head} does not exist in {self.name}: it has layers "
                    f"0-{self.num_layers - 1} and heads 0-{self.num_heads - 1}."
                )
            if head.layer >= self.layers_kept:
                raise ProbeError(
                    f"head {head} lies beyond the {self.layers_kept} layers kept of "
                    f"{self.num_layers} in {self.name}: use layers=None, or heads below layer "
                    f"{self.layers_kept}."
                )
