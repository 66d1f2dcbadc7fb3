"""Constraints on the form of an answer: the words that ask for one, and a check that it is met."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

LEAST_WORDS = 4
DISTINCT = 0.5
SENTENCES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Constraint:
    """One form that an answer may have.

    Attributes:
        name: short, without spaces.
        instruction: what is written after a prompt to ask for it.
        holds: whether a text has the form.
        rewrite: an answer brought into the form, as a demonstration.
        whole: an answer that was cut off at the limit of its length cannot have it.
    """

    name: str
    instruction: str
    holds: Callable[[str], bool]
    rewrite: Callable[[str], str]
    whole: bool = False

    def followed(self, text: str, cut: bool) -> bool:
        """Whether an answer has the form and is more than an empty or looping text."""
        return self.holds(text) and is_readable(text) and not (self.whole and cut)


def is_readable(text: str) -> bool:
    """At least ``LEAST_WORDS`` words, of which at least a share of ``DISTINCT`` differ."""
    words = re.findall(r"\w+", text.lower())
    return len(words) >= LEAST_WORDS and len(set(words)) >= DISTINCT * len(words)


def sentences(text: str) -> list[str]:
    """The text's sentences, as its full stops, exclamation and question marks end them."""
    parts = re.split(r"(?<=[.!?])\s+", " ".join(text.split()))
    return [part for part in parts if part]


def _letters(text: str) -> str:
    return "".join(c for c in text if c.isalpha())


def _is_lower(text: str) -> bool:
    return _letters(text).islower()


def _is_upper(text: str) -> bool:
    return _letters(text).isupper()


def _is_one_sentence(text: str) -> bool:
    return "\n" not in text.strip() and len(sentences(text)) == 1


def _is_json(text: str) -> bool:
    """An object or a list, alone or as the only thing in a code fence."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)```", text.strip(), re.DOTALL)
    try:
        return isinstance(json.loads(fenced.group(1) if fenced else text), dict | list)
    except ValueError:
        return False


def _is_bullets(text: str) -> bool:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return len(lines) >= 2 and all(re.match(r"([-*•]|\d+[.)])\s", line) for line in lines)


def _is_exclaimed(text: str) -> bool:
    """Closing quotes and the like may follow a sentence's end; a list's numbers end none."""
    text = re.sub(r"^\s*\d+[.)]\s", "", text, flags=re.MULTILINE)
    return "!" in text and not re.search(r"[.?][\"'”’)\]*_]*(\s|$)", text)


def _has_no_commas(text: str) -> bool:
    return "," not in text


def _first(text: str) -> str:
    return sentences(text)[0]


def _bullets(text: str) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences(text)[:SENTENCES_SHOWN])


CONSTRAINTS = (
    Constraint(
        "lower-case", "Answer in lower case, without any capital letters.", _is_lower, str.lower
    ),
    Constraint("capitals", "Answer in capital letters only.", _is_upper, str.upper),
    Constraint("one-sentence", "Answer in one sentence.", _is_one_sentence, _first, whole=True),
    Constraint(
        "json",
        "Answer as a JSON object.",
        _is_json,
        lambda text: json.dumps({"answer": _first(text)}),
        whole=True,
    ),
    Constraint("bullets", "Answer as a bullet list.", _is_bullets, _bullets),
    Constraint(
        "exclamation",
        "End every sentence with an exclamation mark.",
        _is_exclaimed,
        lambda text: re.sub(r"[.?](?=\s|$)", "!", text),
    ),
    Constraint(
        "no-commas",
        "Do not use any commas.",
        _has_no_commas,
        lambda text: text.replace(",", ""),
    ),
)
