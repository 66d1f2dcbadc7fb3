"""What the engine is asked for a rerank, and what its answers say of each document token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hook_runtime.errors import IncompleteCaptureError
from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo

from .calibration import NullPassMemory, pass_key
from .errors import NotFiniteError
from .heads import Window
from .inputs import RerankInput
from .prompt import Prompt, PromptBuilder
from .ranking import ScoredDocument
from .scoring import Strategy, aggregate_heads, calibrate, score_document
from .screening import Screen, document_masses
from .windows import WindowPrompt, plan_windows

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class Attention:
    """What passes read, by their keys.

    Attributes:
        tokens: attention summed over heads, float64 [document tokens].
        screened: of screening passes, the masses on instruction and document by head, float32
            [heads, documents, 2]; unchecked, as here no document is known.
    """

    tokens: dict[bytes, np.ndarray]
    screened: dict[bytes, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pass:
    """One prefill to read, and the key under which its attention is found.

    ``known`` is that attention where it is remembered, float64 [document tokens].
    """

    key: bytes
    request: CaptureRequest
    known: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A window's prompt, read under the query and, if calibrated, under the null query.

    ``screen`` is the pass that tells planted orders, if there is one.
    """

    window: WindowPrompt
    query: Pass
    null: Pass | None
    screen: Pass | None = None

    def tokens(self, attention: Attention) -> np.ndarray:
        """What each document token of the window scores, float64 [document tokens]."""
        read = attention.tokens[self.query.key]
        return read if self.null is None else calibrate(read, attention.tokens[self.null.key])

    def screened(self, attention: Attention) -> Sequence[np.ndarray | None]:
        """Each document's masses, float32 [heads, 2]; None each where none was screened."""
        if self.screen is None:
            return [None] * len(self.window.places)
        return list(attention.screened[self.screen.key].swapaxes(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """What each head of a pass gives each document token: float64 [heads, document tokens]."""

    heads: tuple[Head, ...]
    values: np.ndarray

    def of(self, columns: slice) -> dict[str, np.ndarray]:
        """By head, what some of the document tokens get."""
        return {str(h): row[columns] for h, row in zip(self.heads, self.values, strict=True)}


Plan = list[Reading]
"""All that is read for one query."""


@dataclass(frozen=True, slots=True)
class PassReader:
    """Plans the passes of a rerank and reads their captures.

    Attributes:
        heads: None means every head of every layer.
        weights: one per head, or None for a plain sum.
        null_passes: attention under the null query, remembered from one rerank to the next.
        screen: how documents are screened in the same engine batch; or None.
    """

    builder: PromptBuilder
    model: ModelInfo
    strategy: Strategy
    heads: tuple[Head, ...] | None
    weights: tuple[float, ...] | None
    window: Window
    calibrated: bool
    null_passes: NullPassMemory
    screen: Screen | None = None

    @property
    def filters_tokens(self) -> bool:
        """Whether abnormally low tokens are left out: calibration is what makes them so."""
        return self.strategy.token_filter and self.calibrated

    def plan(self, given: RerankInput, by_head: bool = False, screened: bool = True) -> Plan:
        """The windows of one query's documents and the passes over each.

        ``by_head`` has the query's pass read so that ``by_head`` can tell heads apart;
        without ``screened`` documents are not screened.
        """
        return [
            Reading(
                window,
                self._pass(window.prompt, by_head),
                self._null_pass(window.prompt) if self.calibrated else None,
                self._screening_pass(window.prompt) if screened else None,
            )
            for window in plan_windows(given, self.builder, self.window)
        ]

    def unread(self, plans: Iterable[Plan]) -> dict[bytes, CaptureRequest]:
        """The passes to read, each once; remembered null passes need not be.

        A query, its screening and its null pass go side by side, so that the engine computes the
        documents before them once.
        """
        unread: dict[bytes, CaptureRequest] = {}
        for reading in (r for plan in plans for r in plan):
            unread.setdefault(reading.query.key, reading.query.request)
            if reading.screen is not None:
                unread.setdefault(reading.screen.key, reading.screen.request)
            if reading.null is not None and reading.null.known is None:
                unread.setdefault(reading.null.key, reading.null.request)
        return unread

    def attention(
        self,
        plans: Sequence[Plan],
        unread: Mapping[bytes, CaptureRequest],
        captures: Sequence[Capture],
    ) -> Attention:
        """Attention of each document token under each pass; ``captures`` are those of ``unread``.

        Raises:
            IncompleteCaptureError: a capture has not the shape asked for.
        """
        attention = Attention({})
        screening = {r.screen.key for plan in plans for r in plan if r.screen is not None}
        for (key, request), capture in zip(unread.items(), captures, strict=True):
            self._check(request, capture)
            if self.screen is not None and key in screening:
                attention.screened[key] = document_masses(capture)
            else:
                attention.tokens[key] = aggregate_heads(capture.values, self.weights)
        for null in _null_passes(plans):
            if null.known is None:
                self._remember(null.key, attention.tokens[null.key])
            else:
                attention.tokens.setdefault(null.key, null.known)
        return attention

    def by_head(
        self,
        plans: Sequence[Plan],
        unread: Mapping[bytes, CaptureRequest],
        captures: Sequence[Capture],
    ) -> dict[bytes, HeadAttention]:
        """Of queries' passes that were planned ``by_head``: each head's part of the sum, by key."""
        import numpy as np

        queries = {reading.query.key for plan in plans for reading in plan}
        found = {}
        for key, capture in zip(unread, captures, strict=True):
            if key in queries:
                weights = np.ones(len(capture.heads)) if self.weights is None else self.weights
                values = capture.values.astype(np.float64) * np.asarray(weights)[:, None]
                found[key] = HeadAttention(capture.heads, values)
        return found

    def score(
        self,
        given: RerankInput,
        plan: Plan,
        attention: Attention,
        heads: Mapping[bytes, HeadAttention] | None,
    ) -> list[ScoredDocument]:
        """Each document that was read; by head where ``heads`` has that.

        Raises:
            NotFiniteError: the engine returned NaN, or a screening head pays no attention; names
                the document.
        """
        scored = []
        for reading in plan:
            tokens = reading.tokens(attention)
            by_head = heads[reading.query.key] if heads is not None else None
            prompt, start = reading.window.prompt, 0
            for place, offsets, truncated, masses in zip(
                reading.window.places,
                prompt.offsets,
                prompt.truncated,
                reading.screened(attention),
                strict=True,
            ):
                columns = slice(start, start + len(offsets))
                part, start = tokens[columns], columns.stop
                _check_finite(part, place, given)
                score = score_document(part, token_filter=self.filters_tokens)
                each = by_head.of(columns) if by_head is not None else None
                injection = self._suspicion(masses, place, given)
                scored.append(ScoredDocument(place, score, truncated, offsets, each, injection))
        return scored

    def _suspicion(self, masses: np.ndarray | None, place: int, given: RerankInput) -> float | None:
        if self.screen is None or masses is None:
            return None
        try:
            return self.screen.suspicion(masses)
        except NotFiniteError as error:
            raise NotFiniteError(f"{_named(place, given)} cannot be screened: {error}") from None

    def _pass(self, prompt: Prompt, by_head: bool = False) -> Pass:
        rows = prompt.rows(self.strategy.rows)
        # Weights tell heads apart, so only a plain sum can be taken where they are captured.
        probe = AttentionProbe(
            self.heads or "all",
            rows,
            prompt.document_spans,
            sum_heads=self.weights is None and not by_head,
        )
        # No row looks past itself, so the prompt may end with the last of them.
        return self._as_pass(CaptureRequest(prompt.token_ids[: rows[1]], probe))

    def _as_pass(self, request: CaptureRequest) -> Pass:
        return Pass(pass_key(request, self.model.name), request)

    def _screening_pass(self, prompt: Prompt) -> Pass | None:
        return None if self.screen is None else self._as_pass(self.screen.request(prompt))

    def _null_pass(self, prompt: Prompt) -> Pass:
        null = self._pass(self.builder.null(prompt))
        return replace(null, known=self.null_passes.get(null.key))

    def _check(self, request: CaptureRequest, capture: Capture) -> None:
        probe = request.probe
        expected = (1 if probe.sum_heads else len(capture.heads), probe.num_columns)
        if capture.values.shape != expected or probe.heads not in ("all", capture.heads):
            raise IncompleteCaptureError(
                f"the {self.model.backend} backend returned attention of shape "
                f"{capture.values.shape} for heads {' '.join(map(str, capture.heads))}, but "
                f"{request.probe.num_columns} tokens of the heads asked for were expected."
            )

    def _remember(self, key: bytes, attention: np.ndarray) -> None:
        import numpy as np

        if np.isfinite(attention).all():
            self.null_passes.put(key, attention)


def _null_passes(plans: Iterable[Plan]) -> Iterator[Pass]:
    return (r.null for plan in plans for r in plan if r.null is not None)


def _check_finite(tokens: np.ndarray, place: int, given: RerankInput) -> None:
    import numpy as np

    if not np.isfinite(tokens).all():
        raise NotFiniteError(
            f"the engine returned attention that is not finite for {_named(place, given)}: "
            "nothing can be ranked by it. Use dtype='bfloat16' or 'float32' if float16 overflows."
        )


def _named(place: int, given: RerankInput) -> str:
    doc_id = given.doc_ids[place]
    return f"document {place}" if doc_id is None else f"document {place} (id {doc_id!r})"
