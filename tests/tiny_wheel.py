"""A wheel like the embedded model's, but tiny: a quantised llama in GGUF that pip can install."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from core_rerank.embedded import EmbeddedModel

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
MEMBER = "tiny_weights/model.gguf"


@dataclass(frozen=True)
class TinyWheel:
    """The wheel, the entry that names it, and the float32 weights it stands for, by HF name."""

    path: Path
    model: EmbeddedModel
    weights: dict[str, np.ndarray]


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE, in token order."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def make_tiny_wheel(folder: Path, version: str = "1.0") -> TinyWheel:
    """Write ``tiny_weights-VERSION-py3-none-any.whl`` to ``folder``."""
    gguf = folder / "model.gguf"
    weights = write_tiny_gguf(gguf)
    path = folder / f"tiny_weights-{version}-py3-none-any.whl"
    info = f"tiny_weights-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: tiny-weights\nVersion: {version}"
    wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any"
    files = {
        MEMBER: gguf.read_bytes(),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    record = "".join(
        f"{name},sha256={_record_hash(data)},{len(data)}\n" for name, data in files.items()
    )
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**files, f"{info}/RECORD": record.encode()}.items():
            archive.writestr(name, data)
    gguf.unlink()
    model = EmbeddedModel(
        alias="tiny",
        model_id="example/Tiny",
        revision=f"tiny-weights-{version}",
        license="Apache-2.0",
        distribution="tiny-weights",
        version=version,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        gguf_member=MEMBER,
    )
    return TinyWheel(path, model, weights)


def _record_hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write_tiny_gguf(
    path: Path, *, arch: str = "llama", split: str = "smollm", seed: int = 0
) -> dict[str, np.ndarray]:
    """Write a random llama as llama.cpp's converter would; returns what its weights dequantise to.

    The weights are in Hugging Face's row order; the file holds q and k in llama.cpp's.
    """
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter, dequantize, quantize

    random = np.random.default_rng(seed)
    writer = GGUFWriter(path, arch)
    _add_metadata(writer, split)
    weights: dict[str, np.ndarray] = {}

    def add(gguf_name: str, name: str, shape: tuple[int, ...], kind: Kind, heads: int = 0) -> None:
        values = random.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            values += 1
        packed = quantize(values, kind)
        weights[name] = np.array(dequantize(packed, kind), dtype=np.float32).reshape(shape)
        if heads:  # llama.cpp interleaves the two rotary halves of each head
            order = np.arange(shape[0]).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
            packed = packed[order]
        writer.add_tensor(gguf_name, packed, raw_dtype=kind)

    width = HIDDEN // HEADS
    add("token_embd.weight", "model.embed_tokens.weight", (_vocabulary_size(), HIDDEN), Kind.Q8_0)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), Kind.F32)
    for n in range(LAYERS):
        block, layer = f"blk.{n}.", f"model.layers.{n}."
        attention = layer + "self_attn."
        q4, kv = Kind.Q4_1, KV_HEADS * width
        add(block + "attn_norm.weight", layer + "input_layernorm.weight", (HIDDEN,), Kind.F32)
        add(
            block + "ffn_norm.weight",
            layer + "post_attention_layernorm.weight",
            (HIDDEN,),
            Kind.F32,
        )
        add(block + "attn_q.weight", attention + "q_proj.weight", (HIDDEN, HIDDEN), q4, HEADS)
        add(block + "attn_k.weight", attention + "k_proj.weight", (kv, HIDDEN), q4, KV_HEADS)
        add(block + "attn_v.weight", attention + "v_proj.weight", (kv, HIDDEN), q4)
        add(block + "attn_output.weight", attention + "o_proj.weight", (HIDDEN, HIDDEN), q4)
        add(block + "ffn_gate.weight", layer + "mlp.gate_proj.weight", (INTERMEDIATE, HIDDEN), q4)
        add(block + "ffn_up.weight", layer + "mlp.up_proj.weight", (INTERMEDIATE, HIDDEN), q4)
        add(block + "ffn_down.weight", layer + "mlp.down_proj.weight", (HIDDEN, INTERMEDIATE), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _vocabulary_size() -> int:
    return len(SPECIAL) + 256 + 1


def _add_metadata(writer, split: str) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_vocabulary_size())
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list([*SPECIAL, *byte_alphabet(), "he"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
