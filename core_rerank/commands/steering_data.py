"""Reads what a steering vector is fitted on: pairs of prompts, or prompts and an instruction."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from core_rerank.errors import DataError
from core_rerank.rows import read_rows


class Pairs(NamedTuple):
    """Both sides, in the same order: texts or conversations."""

    positive: list[Any]
    negative: list[Any]


def read_lines(path: Path) -> list[str]:
    """The lines that are not blank; DataError where there are none or it is not UTF-8."""
    try:
        # splitlines() would also cut at characters within a line, such as U+2028.
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.") from None
    found = [line for line in lines if line]
    if not found:
        raise DataError(f"{path} holds no prompts: write one a line.")
    return found


def instructed(prompts: list[str], instruction: str, raw: bool) -> Pairs:
    """Each prompt with the instruction after it, and alone.

    Raises:
        ValueError: the instruction is empty.
    """
    from core_rerank.steering import check_instruction, instruction_pairs

    if raw:
        check_instruction(instruction)
        return Pairs([f"{prompt} {instruction}" for prompt in prompts], list(prompts))
    return Pairs(*instruction_pairs(prompts, instruction))


def read_pairs(path: Path, raw: bool) -> Pairs:
    """Rows of JSON Lines; text becomes a user's message unless ``raw``.

    Raises:
        DataError: there are no rows; or names the line that is no such row.
    """
    found = Pairs([], [])
    for where, row in read_rows(path):
        for side in ("positive", "negative"):
            value = row.get(side)
            if not _is_prompt(value):
                raise DataError(
                    f'{where}: "{side}" must be text or a list of messages such as '
                    f'{{"role": "user", "content": "..."}}, not {value!r:.80}.'
                )
            if isinstance(value, str) and not raw:
                value = [{"role": "user", "content": value}]
            getattr(found, side).append(value)
    if not found.positive:
        raise DataError(f"{path} holds no pairs: write one a line.")
    return found


def _is_prompt(value: object) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list) and bool(value) and all(_is_message(m) for m in value)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )
