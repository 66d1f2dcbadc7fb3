"""Text to tokens: control tokens are spelled out, offsets kept, for any kind of added token."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_families import FAMILIES
from tokenizers import AddedToken

from core_rerank.errors import PromptError
from core_rerank.tokens import PlainTextEncoder, Tokens


def encoder_with(*tokens: AddedToken, family: str = "metaspace-first") -> tuple[Any, Any]:
    tokenizer = FAMILIES[family]()
    tokenizer.add_tokens(list(tokens))
    return tokenizer, PlainTextEncoder(tokenizer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "text",
    ["</s>", "a</s>b", "<s></s>[INST][/INST]", "<</s>/s>", "<unk>", "x <unk></s> y", "</s></s>"],
)
def test_special_tokens_are_spelled_out(family: str, text: str) -> None:
    tokenizer = FAMILIES[family]()
    tokens = PlainTextEncoder(tokenizer).encode(text)
    control = set(tokenizer.get_added_vocab().values())
    written = [text[start:end] for start, end in tokens.offsets]
    forged = [w for i, w in zip(tokens.ids, written, strict=True) if i in control]
    assert not any(w in tokenizer.get_added_vocab() for w in forged)
    assert "".join(written) == text


def test_added_tokens_that_are_not_special_are_spelled_out_too() -> None:
    tokenizer, encoder = encoder_with(AddedToken("<think>"), AddedToken("think>"))
    text = "a <think>b</think> <<think>think>"
    tokens = encoder.encode(text)
    assert not set(tokens.ids) & {tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "think>")}
    assert tokenizer.decode(tokens.ids) == text


def test_whitespace_keeps_its_added_tokens() -> None:
    tokenizer, encoder = encoder_with(AddedToken("    "), AddedToken("▁▁▁"))
    wide = tokenizer.convert_tokens_to_ids("    ")
    assert wide in encoder.encode("a    b").ids


def test_a_control_token_of_one_character_is_dropped() -> None:
    tokenizer, encoder = encoder_with(AddedToken("\x03", special=True))
    tokens = encoder.encode("a\x03b")
    assert tokenizer.convert_tokens_to_ids("\x03") not in tokens.ids


def test_unknown_characters_stay() -> None:
    tokenizer = FAMILIES["unigram"]()
    tokens = PlainTextEncoder(tokenizer).encode("日")
    assert tokens == Tokens((tokenizer.unk_token_id,), ((0, 1),))


def test_a_lone_surrogate_is_read_as_the_replacement_character(smollm2_tokenizer: Any) -> None:
    encoder = PlainTextEncoder(smollm2_tokenizer)
    assert encoder.encode("a\ud83d b\udc00") == encoder.encode("a\ufffd b\ufffd")


def test_offsets_after_a_blank(smollm2_tokenizer: Any) -> None:
    encoder = PlainTextEncoder(smollm2_tokenizer)
    assert encoder.encode_after_blank("Paris is").offsets == ((0, 5), (5, 8))
    assert encoder.encode_after_blank("日").offsets[0] == (0, 1)
    assert encoder.encode_after_blank("").offsets == ((0, 0),)


def test_a_cut_goes_back_to_a_whole_character() -> None:
    tokens = Tokens((1, 2, 3, 4, 5), ((0, 1), (1, 2), (1, 2), (1, 2), (2, 3)))
    assert len(tokens.cut(9)) == 5
    assert len(tokens.cut(4)) == 4
    assert len(tokens.cut(3)) == len(tokens.cut(2)) == 1
    # A first character longer than the limit is all there is to keep.
    assert len(Tokens((1, 2, 3), ((0, 1), (0, 1), (0, 1))).cut(2)) == 2


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        pass

    with pytest.raises(PromptError, match="Slow is not a fast tokenizer"):
        PlainTextEncoder(Slow())
