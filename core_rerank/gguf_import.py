"""Turn a GGUF file of the llama architecture into a bf16 Hugging Face folder, without torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader

#: llama.cpp tensor name (of a block, without ``blk.N.``) -> Hugging Face name within the layer.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_NORMAL_TOKEN, _CONTROL_TOKEN = 1, 3


class GGUFError(ValueError):
    """The file is not a GGUF file that can be turned into a Hugging Face folder exactly."""


def convert(
    gguf_path: Path, folder: Path, *, on_tensor: Callable[[int, int], None] | None = None
) -> None:
    """Write config, generation config, tokenizer and bf16 weights of ``gguf_path`` to ``folder``.

    Every weight is dequantised to float32 and rounded to the nearest bfloat16.

    Args:
        gguf_path: a GGUF file: architecture ``llama``, byte-level BPE with the ``smollm`` split.
        folder: an existing, empty folder.
        on_tensor: called with (tensors done, tensors in all).

    Raises:
        GGUFError: unreadable, or of a kind this conversion does not cover.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OverflowError) as error:
        raise GGUFError(f"{gguf_path} is not a readable GGUF file: {error}") from error
    config = _config(reader)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(config))
    _write_tokenizer(reader, config, folder)
    _write_weights(reader, config, folder / "model.safetensors", on_tensor)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise GGUFError(f"the GGUF file has no field {name!r}, which the conversion needs.")
    return field.contents()


def _expect(reader: GGUFReader, name: str, expected: str) -> None:
    value = _field(reader, name)
    if value != expected:
        raise GGUFError(f"the GGUF file has {name} = {value!r}; only {expected!r} is supported.")


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The ``LlamaConfig`` fields that the GGUF metadata states."""
    _expect(reader, "general.architecture", "llama")
    hidden = _field(reader, "llama.embedding_length")
    heads = _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # float32 in the file: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _generation_config(config: dict[str, Any]) -> dict[str, Any]:
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _write_tokenizer(reader: GGUFReader, config: dict[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE, digits split one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    _expect(reader, "tokenizer.ggml.model", "gpt2")
    _expect(reader, "tokenizer.ggml.pre", "smollm")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    if set(kinds) - {_NORMAL_TOKEN, _CONTROL_TOKEN} or any(len(merge) != 2 for merge in merges):
        raise GGUFError("the GGUF file's vocabulary has tokens or merges of an unknown kind.")

    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token", "eos_token", "pad_token"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            # A class that keeps tokenizer.json as it is: GPT2Tokenizer would rebuild the
            # pre-tokenizer and lose the digit split.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            **{name: tokens[config[f"{name}_id"]] for name in sorted(named)},
            "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
            "additional_special_tokens": special,
            "chat_template": _field(reader, "tokenizer.chat_template"),
        },
    )


def _hf_name(gguf_name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    stem, _, kind = gguf_name.rpartition(".")
    if kind == "weight" and stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    parts = stem.split(".")
    if kind == "weight" and len(parts) == 3 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.weight"
    raise GGUFError(f"the GGUF file has a tensor {gguf_name!r} that a llama model does not.")


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of a q or k projection.

    llama.cpp stores each head's rows with the two rotary halves interleaved; Hugging Face keeps
    the halves one after the other.

    Args:
        weight: [num_heads * head_dim, hidden].
        num_heads: query heads for q, key-value heads for k.

    Returns:
        The same rows in Hugging Face's order, same shape.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def to_bfloat16_bytes(values: np.ndarray) -> bytes:
    """Finite float32 values of any shape as little-endian bfloat16, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()


def _write_weights(
    reader: GGUFReader,
    config: dict[str, Any],
    path: Path,
    on_tensor: Callable[[int, int], None] | None,
) -> None:
    """Write all tensors as one safetensors file, one tensor in memory at a time."""
    from gguf import dequantize

    permuted_heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    names = [(_hf_name(tensor.name), tensor) for tensor in reader.tensors]
    with path.open("wb") as file:
        # GGUF lists the fastest-varying dimension first.
        _write_safetensors_header(
            file, [(name, [int(n) for n in reversed(tensor.shape)]) for name, tensor in names]
        )
        for done, (_, tensor) in enumerate(names, start=1):
            weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            weight = weight.reshape([int(n) for n in reversed(tensor.shape)])
            if not np.isfinite(weight).all():
                raise GGUFError(f"tensor {tensor.name!r} holds values that are not finite.")
            heads = permuted_heads.get(tensor.name.split(".")[-2])
            if heads is not None:
                weight = unpermute(weight, heads)
            file.write(to_bfloat16_bytes(weight))
            if on_tensor is not None:
                on_tensor(done, len(names))


def _write_safetensors_header(file: BinaryIO, tensors: Sequence[tuple[str, list[int]]]) -> None:
    """Write the safetensors prologue: header length (u64, little-endian) and JSON header.

    ``safetensors`` itself cannot write bfloat16 without torch through a stable call.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
