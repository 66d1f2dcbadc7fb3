"""Plain text to token ids in which no control token can appear, with character offsets."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hook_runtime.specs import Span

from .errors import PromptError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids and, for each, its half-open character offsets into the text it came from."""

    ids: tuple[int, ...]
    offsets: tuple[Span, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, limit: int) -> Tokens:
        """The first ``limit`` tokens, or a few less: never half a character."""
        if len(self) <= limit:
            return self
        end = limit
        while end > 0 and self.offsets[end][0] < self.offsets[end - 1][1]:
            end -= 1
        end = end or limit
        return Tokens(self.ids[:end], self.offsets[:end])


class PlainTextEncoder:
    """Encodes text as the continuation of a prompt, whatever the text says. Thread-safe.

    A private copy of the tokenizer differs from it in three points. Special tokens written in the
    text, and other added tokens such as ``<think>``, are read as the characters they are made of;
    whitespace that has an added token of its own keeps it. No blank is put before the text, as
    sentencepiece-like tokenizers do at the start of a prompt. There is no truncation, padding or
    post-processing.
    """

    def __init__(self, tokenizer: Any, template: str = "") -> None:
        """Copy ``tokenizer``, a Hugging Face tokenizer with a ``tokenizer.json`` behind it.

        ``template_ids`` are those of ``template``, in which control tokens do count as such.

        Raises:
            PromptError: the tokenizer is not a fast one.
        """
        self._tokenizer = _continuing_copy(tokenizer)
        self.template_ids = tuple(self._tokenizer.encode(template, add_special_tokens=False).ids)
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        self._control = {
            i: token.content
            for i, token in added.items()
            if token.special or token.content.replace("▁", " ").strip()
        }
        self._unknown = getattr(tokenizer, "unk_token_id", None)

    def encode(self, text: str) -> Tokens:
        """Ids and offsets of ``text``; a lone surrogate is read as U+FFFD."""
        pairs = list(self._encode(_SURROGATE.sub(_REPLACEMENT, text), 0))
        return Tokens(tuple(i for i, _ in pairs), tuple(offsets for _, offsets in pairs))

    def encode_after_blank(self, text: str) -> Tokens:
        """As ``encode(" " + text)``, with offsets into ``text`` itself.

        The blank belongs to the first token if the tokenizer joins it to the word; a token of the
        blank alone has the offsets (0, 0).
        """
        tokens = self.encode(" " + text)
        offsets = tuple((max(start - 1, 0), max(end - 1, 0)) for start, end in tokens.offsets)
        return Tokens(tokens.ids, offsets)

    def _encode(self, text: str, shift: int) -> Iterator[tuple[int, Span]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = list(zip(encoding.ids, encoding.offsets, strict=True))
        control = [(i, span) for i, span in pairs if self._is_control(i, text[slice(*span)])]
        cuts = {start + 1 for _, (start, end) in control if end - start > 1}
        if cuts:
            # Cut inside every control token, so that its characters no longer stand together.
            places = [0, *sorted(cuts), len(text)]
            for start, end in pairwise(places):
                yield from self._encode(text[start:end], shift + start)
            return
        # What is left are control tokens of one character, which no cut takes apart.
        unavoidable = {pair for pair in control if pair[0] in self._special}
        for token, (start, end) in pairs:
            if (token, (start, end)) not in unavoidable:
                yield token, (shift + start, shift + end)

    def _is_control(self, token: int, written: str) -> bool:
        content = self._control.get(token)
        if content is None:
            return False
        # The unknown token also stands for characters that the vocabulary lacks.
        return token != self._unknown or content in written


def _continuing_copy(tokenizer: Any) -> Tokenizer:
    """A copy that encodes text as a later part of a prompt: nothing is put before or after it."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise PromptError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which exact spans need: "
            "load the model with a Hugging Face tokenizer that has a tokenizer.json."
        )
    settings = json.loads(backend.to_str())
    settings.update(truncation=None, padding=None, post_processor=None)
    settings["normalizer"] = _without_prefix(settings.get("normalizer"))
    settings["pre_tokenizer"] = _without_prefix(settings.get("pre_tokenizer"))
    return Tokenizer.from_str(json.dumps(settings))


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer without the step that puts a blank before the text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    for steps in ("normalizers", "pretokenizers"):
        if steps in part:
            kept = (_without_prefix(step) for step in part[steps])
            part[steps] = [step for step in kept if step is not None]
    if "prepend_scheme" in part:
        part["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        part["add_prefix_space"] = False
    return part
