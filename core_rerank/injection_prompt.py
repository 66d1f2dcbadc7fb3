"""The prompt of a trusted instruction and untrusted data, as token ids with exact spans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jinja2.exceptions import TemplateError

from hook_runtime.specs import AttentionProbe, Capture, CaptureRequest, Head, Span

from .errors import PromptError
from .prompt import render_chat
from .tokens import PlainTextEncoder

if TYPE_CHECKING:
    import numpy as np

Heads = tuple[Head, ...] | Literal["all"]
LABEL = "Data:"
_INSTRUCTION = "core-rerank-instruction-9d2e"
_DATA = "core-rerank-data-7c50"


@dataclass(frozen=True, slots=True)
class GuardedPrompt:
    """Token ids with the places of instruction and data; spans are half-open and never overlap.

    ``data_span`` is empty (start = end) where the data has no tokens.
    """

    token_ids: tuple[int, ...]
    instruction_span: Span
    data_span: Span

    @property
    def data_tokens(self) -> int:
        """Tokens of the data."""
        return self.data_span[1] - self.data_span[0]


class GuardedPromptBuilder:
    """Builds such prompts for one model. Thread-safe.

    The instruction is the system's message and ``Data: <data>`` the user's (the layout of Attention
    Tracker, arXiv 2411.00348); where the chat template knows no system message, the instruction
    comes first in the user's, a blank line before the data. A control token written in either text
    becomes plain text, so that data cannot close its own message.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        """``tokenizer``: a fast Hugging Face tokenizer; ``max_model_len``: tokens in a sequence.

        Raises:
            PromptError: the tokenizer is not a fast one, or its chat template drops a message.
        """
        self._limit = max_model_len - 1  # the engine generates one token
        before, between, after = _frame(tokenizer)
        opening = tokenizer(before, add_special_tokens=False)["input_ids"] if before else []
        if not tokenizer.chat_template and tokenizer.bos_token_id is not None:
            opening = [tokenizer.bos_token_id, *opening]
        self._opening = tuple(opening)
        self._between = PlainTextEncoder(tokenizer, between + LABEL).template_ids
        self._encoder = PlainTextEncoder(tokenizer, after)

    def build(self, instruction: str, data: str) -> GuardedPrompt:
        """The prompt that gives ``instruction`` and shows ``data``; nothing is ever cut.

        Raises:
            TypeError: one of them is no string.
            PromptError: the instruction has no tokens, or both do not fit the model.
        """
        for name, text in (("instruction", instruction), ("data", data)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a string, not {type(text).__name__}.")
        told = self._encoder.encode(instruction).ids
        if not instruction.strip() or not told:
            raise PromptError(
                f"the instruction is blank: {instruction!r}. Give the task that the model has."
            )
        shown = self._encoder.encode_after_blank(data)
        lead = next((i for i, (_, end) in enumerate(shown.offsets) if end > 0), len(shown))
        start = len(self._opening)
        data_start = start + len(told) + len(self._between) + lead
        ids = (*self._opening, *told, *self._between, *shown.ids, *self._encoder.template_ids)
        if len(ids) > self._limit:
            raise PromptError(
                f"instruction and data make a prompt of {len(ids)} tokens, and {self._limit} fit: "
                "score the data in parts, or raise max_model_len. Nothing is cut, because an "
                "attack could stand in what was left out."
            )
        return GuardedPrompt(
            token_ids=ids,
            instruction_span=(start, start + len(told)),
            data_span=(data_start, data_start + len(shown) - lead),
        )


def guarded_request(prompt: GuardedPrompt, heads: Heads) -> CaptureRequest:
    """What the prompt's last token pays instruction and data, by each of ``heads`` (or "all")."""
    end = len(prompt.token_ids)
    spans = (prompt.instruction_span, *([prompt.data_span] if prompt.data_tokens else []))
    probe = AttentionProbe(heads, (end - 1, end), spans, reduction="documents")
    return CaptureRequest(prompt.token_ids, probe)


def instruction_and_data(prompt: GuardedPrompt, capture: Capture) -> np.ndarray:
    """The capture of ``guarded_request`` as float32 [heads, 2]; data without tokens draws none."""
    import numpy as np

    if prompt.data_tokens:
        return capture.values
    return np.pad(capture.values, ((0, 0), (0, 1)))


def _frame(tokenizer: Any) -> tuple[str, str, str]:
    """What stands before the instruction, between it and the data's label, and after the data."""
    if not tokenizer.chat_template:
        return "", "\n\n", "\n\n"
    shown = f"{LABEL} {_DATA}"
    layouts = (
        [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": shown}],
        [{"role": "user", "content": f"{_INSTRUCTION}\n\n{shown}"}],
    )
    for messages in layouts:
        try:
            text = render_chat(tokenizer, messages)
        except TemplateError:  # as templates without a system message say it
            continue
        before, found, rest = text.partition(_INSTRUCTION)
        between, shown_found, after = rest.partition(shown)
        if found and shown_found and text.count(_INSTRUCTION) == text.count(_DATA) == 1:
            return before, between, after
    raise PromptError(
        "the tokenizer's chat template repeats neither a system and a user message nor a user's "
        "alone exactly once: instruction and data cannot be placed in it."
    )
