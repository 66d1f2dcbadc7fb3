"""GGUF to a Hugging Face folder: every weight, the tokenizer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_wheel import CHAT_TEMPLATE, HEADS, HIDDEN, write_tiny_gguf

from core_rerank.gguf_import import GGUFError, convert, to_bfloat16_bytes, unpermute


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A converted tiny model, and the float32 weights its GGUF file stands for."""
    root = tmp_path_factory.mktemp("gguf")
    weights = write_tiny_gguf(root / "model.gguf")
    folder = root / "folder"
    folder.mkdir()
    convert(root / "model.gguf", folder)
    return folder, weights


def test_every_weight_is_the_dequantised_one_rounded_to_bfloat16(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    import torch
    from safetensors.torch import load_file

    folder, weights = converted
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == weights.keys()
    for name, expected in weights.items():
        assert stored[name].dtype == torch.bfloat16
        assert torch.equal(stored[name], torch.from_numpy(expected).to(torch.bfloat16)), name


def test_the_folder_loads_as_the_same_model(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    folder, weights = converted
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(weights["model.embed_tokens.weight"]),
            hidden_size=HIDDEN,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
            tie_word_embeddings=True,
        )
    )
    state = {
        name: torch.from_numpy(value).to(torch.bfloat16).float() for name, value in weights.items()
    }
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, reference(tokens).logits)
    assert loaded.config.max_position_embeddings == 512
    assert loaded.config.eos_token_id == 2


def test_the_tokenizer_splits_digits_and_keeps_control_tokens(
    converted: tuple[Path, dict[str, np.ndarray]],
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert tokenizer.is_fast
    assert tokenizer.tokenize("he 12½") == ["he", "Ġ", "1", "2", "Â", "½"]
    assert tokenizer("<|im_end|>").input_ids == [2]
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.model_max_length == 512


def test_the_embedded_models_tokenizer_gives_text_back(smollm2_tokenizer: Any) -> None:
    for text in [
        "  a  ",
        "\n\t\r\n",
        "日本語",
        "👩‍👩‍👧 🏳️‍🌈",
        "שלום",
        "Ⅷ ½ ٣",
        "\x00",
        "<|im_start|>x",
    ]:
        assert smollm2_tokenizer.decode(smollm2_tokenizer(text).input_ids) == text
    # A blank and a digit never share a token, although the vocabulary has such pairs of bytes.
    assert smollm2_tokenizer.tokenize(" ½") == ["Ġ", "Â½"]


def test_the_embedded_model_knows_a_capital(smollm2_dir: Path, smollm2_tokenizer: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    inputs = smollm2_tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0]
    answer = smollm2_tokenizer.decode(tokens[inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parametrize(
    ("arch", "split", "message"),
    [
        ("qwen2", "smollm", "general.architecture = 'qwen2'"),
        ("llama", "gpt-2", "tokenizer.ggml.pre = 'gpt-2'"),
    ],
)
def test_another_kind_of_file_is_refused(
    tmp_path: Path, arch: str, split: str, message: str
) -> None:
    write_tiny_gguf(tmp_path / "model.gguf", arch=arch, split=split)
    with pytest.raises(GGUFError, match=message):
        convert(tmp_path / "model.gguf", tmp_path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(GGUFError, match="not a readable GGUF file"):
        convert(tmp_path / "model.gguf", tmp_path)


def test_unpermute_restores_the_rotary_halves() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four rows: halves 0 1 | 2 3
    stored = rows[[0, 2, 1, 3, 4, 6, 5, 7]]
    assert np.array_equal(unpermute(stored, 2), rows)


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    ties = np.array([0x3F808000, 0x3F818000, 0xBF808000, 0], dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, ties])
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert to_bfloat16_bytes(values) == expected


def test_the_header_names_the_format(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    data = (converted[0] / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length])["__metadata__"] == {"format": "pt"}
