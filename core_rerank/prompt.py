"""Prompts in the layout of ICR and CoRe, built segment by segment so that every span is exact.

    <chat prefix> Here are some paragraphs:

    [document 1] <text>

    [document 2] <text>

    Please find information that are relevant to the following query in the paragraphs above.

    Query: <query><chat suffix>

The wording is that of both papers' code (arXiv 2410.02642, 2510.02219), its slip of grammar
included: another wording gives other scores. Instruction and documents come before the query, so
their keys are the same for every query and come from the prefix cache.

A control token written in a document or query becomes plain text. Where a chat template's markers
are ordinary text, as ``[INST]`` of Llama 2 is, a document can still write them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from hook_runtime.specs import Span

from .errors import PromptError
from .memory import BoundedMemory
from .tokens import PlainTextEncoder, Tokens

NULL_QUERY = "N/A"
DEFAULT_MAX_TOKENS_PER_DOC = 512
MIN_TOKENS_PER_DOC = 16
OPENING = " Here are some paragraphs:"
SEPARATOR = "\n\n"
INSTRUCTION = (
    "Please find information that are relevant to the following query in the paragraphs above."
)
ANSWER_INSTRUCTION = "Answer the question below with what the paragraphs above say."
# Templates that print a date get always the same one: a prompt must not change overnight.
TEMPLATE_DATE = date(2024, 7, 26)
# Of a text that is far too long, this much is tokenized at first: more than most tokens span, and
# a little beyond the limit, because the last tokens depend on where the text was cut.
_CHARS_PER_TOKEN = 8
_SPARE_TOKENS = 64
MAX_REMEMBERED_TOKENS = 400_000  # about 60 MB of ids and offsets
_MARKER = "core-rerank-content-4b1d"


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with the places of what they say; every span is half-open.

    Attributes:
        token_ids: the whole prompt.
        document_spans: one per document, ascending: its text's tokens, no label, no separator.
        query_span: the query's text, which no other span overlaps.
        instruction_span: from "Please find" to "Query:"; ends before the query.
        truncated: per document, whether its end was cut off.
        offsets: per document and token, character offsets into the document's text.
    """

    token_ids: tuple[int, ...]
    document_spans: tuple[Span, ...]
    query_span: Span
    instruction_span: Span
    truncated: tuple[bool, ...]
    offsets: tuple[tuple[Span, ...], ...]

    def rows(self, which: Literal["query", "instruction"]) -> Span:
        """The tokens that look: the query's text, or all from the instruction to the end."""
        if which == "query":
            return self.query_span
        return self.instruction_span[0], len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Segment:
    """A text's tokens; ``lead`` is the blank before it where that is a token of its own."""

    lead: tuple[int, ...]
    tokens: Tokens


class PromptBuilder:
    """Builds prompts for one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC,
    ) -> None:
        """``tokenizer``: a fast Hugging Face tokenizer; ``max_model_len``: tokens in a sequence.

        Raises:
            PromptError: the tokenizer is not a fast one, or its chat template drops the message.
        """
        self._limit = max_model_len - 1  # the engine generates one token
        self.max_tokens_per_doc = max_tokens_per_doc
        prefix, suffix = _chat_frame(tokenizer)
        self._encoder = PlainTextEncoder(tokenizer, suffix)
        opening = tokenizer(prefix + OPENING, add_special_tokens=False)["input_ids"]
        if not tokenizer.chat_template and tokenizer.bos_token_id is not None:
            opening = [tokenizer.bos_token_id, *opening]
        self._separator = self._encoder.encode(SEPARATOR).ids
        self._opening = (*opening, *self._separator)
        self._instruction = self._encoder.encode(f"{INSTRUCTION}{SEPARATOR}Query:").ids
        self._suffix = self._encoder.template_ids
        self._null = self.tokenize(NULL_QUERY)
        self._documents: BoundedMemory[Segment] = BoundedMemory(MAX_REMEMBERED_TOKENS)

    def tokenize(self, text: str) -> Segment:
        """A document's or a query's tokens, none of them a control token.

        ``tokens`` is empty for a text that the tokenizer turns into nothing.
        """
        tokens = self._encoder.encode_after_blank(text)
        lead = next((i for i, (_, end) in enumerate(tokens.offsets) if end > 0), len(tokens))
        return Segment(tokens.ids[:lead], Tokens(tokens.ids[lead:], tokens.offsets[lead:]))

    def tokenize_document(self, text: str) -> Segment:
        """As ``tokenize``, but of a very long text only the beginning, safely beyond the limit.

        Texts are remembered, since the same documents are often ranked for the next query.
        """
        known = self._documents.get(text)
        if known is None:
            known = self._tokenize_beginning(text)
            self._documents.put(text, known, len(known.tokens) + len(text) // _CHARS_PER_TOKEN)
        return known

    def _tokenize_beginning(self, text: str) -> Segment:
        enough = self.max_tokens_per_doc + _SPARE_TOKENS
        chars = enough * _CHARS_PER_TOKEN
        segment = self.tokenize(text[:chars])
        while chars < len(text) and len(segment.tokens) < enough:
            chars *= 4
            segment = self.tokenize(text[:chars])
        return segment

    def build(
        self,
        query: str | Segment,
        documents: Sequence[str | Segment],
        max_tokens_per_doc: int | None = None,
        reserve: int = 0,
    ) -> Prompt:
        """The prompt that asks ``query`` about ``documents`` and leaves ``reserve`` tokens free.

        A document over ``max_tokens_per_doc`` tokens (the builder's, or the fewer asked for here)
        is cut to that; if the prompt is then still longer than the model allows, all documents are
        cut to one common length that fits. The query and the suffix are never cut. Room is kept
        for the null query.

        Raises:
            PromptError: the query does not fit, or each document would be left with fewer than
                ``MIN_TOKENS_PER_DOC`` tokens; or a document or the query has no tokens.
            ValueError: there is no document.
        """
        asked = query if isinstance(query, Segment) else self.tokenize(query)
        segments = [d if isinstance(d, Segment) else self.tokenize_document(d) for d in documents]
        _check_texts(asked, segments)
        labels = [self._encoder.encode(f"[document {i + 1}]").ids for i in range(len(segments))]
        longest = min(max_tokens_per_doc or self.max_tokens_per_doc, self.max_tokens_per_doc)
        cap = self._fit(asked, segments, labels, longest, reserve)

        ids = list(self._opening)
        spans: list[Span] = []
        cuts = [segment.tokens.cut(cap) for segment in segments]
        for label, segment, cut in zip(labels, segments, cuts, strict=True):
            ids += (*label, *segment.lead)
            spans.append((len(ids), len(ids) + len(cut)))
            ids += (*cut.ids, *self._separator)
        instruction = (len(ids), len(ids) + len(self._instruction))
        return self._ask(
            asked,
            Prompt(
                token_ids=(*ids, *self._instruction),
                document_spans=tuple(spans),
                query_span=instruction,
                instruction_span=instruction,
                truncated=tuple(
                    len(c) < len(s.tokens) for c, s in zip(cuts, segments, strict=True)
                ),
                offsets=tuple(cut.offsets for cut in cuts),
            ),
        )

    def null(self, prompt: Prompt) -> Prompt:
        """The same prompt with the content-free query "N/A" (ICR's calibration)."""
        return self._ask(self._null, prompt)

    def answering(
        self, query: str, prompt: Prompt, labels: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], int]:
        """Token ids that ask for an answer from the documents of ``prompt``, and the room left.

        They begin as ``prompt`` does, up to the end of its documents, so that an engine which has
        computed that need not compute it again. ``labels``, from 1, are of the documents that
        matter most, and are named. The room is tokens to answer in, below 0 where the prompt is
        too long itself.
        """
        named = ", ".join(f"[document {label}]" for label in labels)
        told = f" The most relevant of them: {named}." if named else ""
        asked = self.tokenize(query)
        documents = prompt.token_ids[: prompt.instruction_span[0]]
        words = self._encoder.encode(f"{ANSWER_INSTRUCTION}{told}{SEPARATOR}Question:").ids
        ids = (*documents, *words, *asked.lead, *asked.tokens.ids, *self._suffix)
        return ids, self._limit + 1 - len(ids)

    def _ask(self, query: Segment, prompt: Prompt) -> Prompt:
        head = (*prompt.token_ids[: prompt.instruction_span[1]], *query.lead)
        return Prompt(
            token_ids=(*head, *query.tokens.ids, *self._suffix),
            document_spans=prompt.document_spans,
            query_span=(len(head), len(head) + len(query.tokens)),
            instruction_span=prompt.instruction_span,
            truncated=prompt.truncated,
            offsets=prompt.offsets,
        )

    def _fit(
        self,
        query: Segment,
        segments: Sequence[Segment],
        labels: Sequence[Sequence[int]],
        longest: int,
        reserve: int,
    ) -> int:
        """Tokens that each document may keep, at most ``longest``."""
        asked = max(len(s.lead) + len(s.tokens) for s in (query, self._null))
        frame = reserve + len(self._opening) + len(self._instruction) + len(self._suffix) + asked
        around = [
            len(label) + len(segment.lead) + len(self._separator)
            for label, segment in zip(labels, segments, strict=True)
        ]
        lengths = [min(len(s.tokens), longest) for s in segments]
        room = self._limit - frame - sum(around)
        if sum(lengths) <= room:
            return longest
        cap = _common_length(lengths, room)
        if cap >= MIN_TOKENS_PER_DOC:
            return cap
        fitting = (self._limit - frame) // (max(around) + MIN_TOKENS_PER_DOC)
        if fitting < 1:
            raise PromptError(
                f"the query has {asked} tokens, which leaves less than {MIN_TOKENS_PER_DOC} for a "
                f"document: the prompt may have {self._limit} tokens and needs {frame} without "
                "documents. Shorten the query or raise max_model_len."
            )
        raise PromptError(
            f"{len(segments)} documents do not fit in one prompt of {self._limit} tokens: each "
            f"would keep {max(cap, 0)} tokens, and at least {MIN_TOKENS_PER_DOC} are needed. Use "
            f"window={fitting} or less, or raise max_model_len."
        )


def _check_texts(query: Segment, documents: Sequence[Segment]) -> None:
    if not documents:
        raise ValueError("there are no documents: a prompt needs at least one.")
    names = ("the query", *(f"document {i}" for i in range(len(documents))))
    for name, segment in zip(names, (query, *documents), strict=True):
        if not segment.tokens.ids:
            raise PromptError(f"{name} has no text that the model's tokenizer knows.")


def _common_length(lengths: Sequence[int], room: int) -> int:
    """The largest ``cap`` with ``sum(min(length, cap)) <= room``, where not all have room."""
    left = len(lengths)
    for length in sorted(lengths):
        if length * left > room:
            break
        room -= length
        left -= 1
    return room // left


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a user's message; nothing without one."""
    if not tokenizer.chat_template:
        return "", ""
    for content in (_MARKER, [{"type": "text", "text": _MARKER}]):
        text = render_chat(tokenizer, [{"role": "user", "content": content}])
        if text.count(_MARKER) == 1:
            before, _, after = text.partition(_MARKER)
            return before, after
    raise PromptError(
        "the tokenizer's chat template does not repeat a user's message exactly once: "
        f"it rendered {text!r}."
    )


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> str:
    """``messages`` as the tokenizer's chat template writes them, up to where an answer begins."""
    return tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=True,
        date_string=TEMPLATE_DATE.strftime("%d %b %Y"),
        strftime_now=TEMPLATE_DATE.strftime,
        enable_thinking=False,
    )
