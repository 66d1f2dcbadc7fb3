"""Small tokenizers of several families, trained on the spot."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

CORPUS = [
    "Here are some paragraphs: [document 1] The cat sat on the mat.",
    "Please find information that are relevant to the following query in the paragraphs above.",
    "Query: Where did the cat sit? N/A [INST] [/INST] </s> <s> think system user assistant",
    "the cat sat on the mat, a dog barked, nothing of the kind",
    "Das Wetter ist schön. Il fait beau aujourd'hui. 0123456789",
]
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] | trim }} [/INST]{% endfor %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}<|im_start|>assistant\n"
)
CHATML = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
MISTRAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
BYTES = [f"<0x{value:02X}>" for value in range(256)]
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]


def byte_level_bpe() -> Any:
    """Qwen- and SmolLM2-like, small: every byte has a token, nothing is unknown."""
    return _wrapped(json.loads(_trained_byte_level()), CHATML_TEMPLATE, CHATML)


@cache
def _trained_byte_level() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(CHATML.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer.to_str()


def metaspace_bpe(scheme: str = "first") -> Any:
    """Mistral-like: a blank is put before the prompt, bytes for what the vocabulary lacks."""
    settings = json.loads(_trained_bpe())
    settings["pre_tokenizer"]["prepend_scheme"] = scheme
    return _wrapped(settings)


def prepend_bpe() -> Any:
    """Llama-2-like: the blank comes from the normalizer."""
    settings = json.loads(_trained_bpe())
    settings["pre_tokenizer"] = None
    settings["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    return _wrapped(settings)


def unigram() -> Any:
    """T5- and XGLM-like: control tokens are pieces of the vocabulary, unknown characters unk."""
    return _wrapped(json.loads(_trained_unigram()))


@cache
def _trained_unigram() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer.to_str()


@cache
def _trained_bpe() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[*SPECIAL, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    settings = json.loads(tokenizer.to_str())
    # The trainer makes the bytes control tokens, which in sentencepiece models they are not.
    settings["added_tokens"] = [t for t in settings["added_tokens"] if t["content"] in SPECIAL]
    return json.dumps(settings)


def _wrapped(
    settings: dict[str, Any],
    template: str = MISTRAL_TEMPLATE,
    special: dict[str, str] = MISTRAL,
) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(settings)),
        chat_template=template,
        **special,
    )


FAMILIES = {
    "byte-level": byte_level_bpe,
    "metaspace-first": metaspace_bpe,
    "metaspace-always": lambda: metaspace_bpe("always"),
    "prepend": prepend_bpe,
    "unigram": unigram,
}
