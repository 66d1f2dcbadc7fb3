"""Detection on a real model whose weights were edited so that one head looks for equal tokens."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from core_rerank.head_attention import HeadAttention
from core_rerank.head_detection import Selection, find_heads
from core_rerank.head_measuring import MeasureSettings, measure_attention
from core_rerank.head_methods import METHODS, Method
from core_rerank.labelled_queries import LabelledQuery
from core_rerank.types import Document
from hook_runtime.specs import Head

PLANTED = Head(0, 4)
WORDS = [
    "river",
    "mountain",
    "violin",
    "engine",
    "garden",
    "planet",
    "bridge",
    "castle",
    "window",
    "forest",
    "doctor",
    "harbor",
    "pencil",
    "market",
    "winter",
    "summer",
    "silver",
    "copper",
    "island",
    "valley",
    "ocean",
    "desert",
    "temple",
    "museum",
    "rocket",
    "guitar",
    "coffee",
    "orange",
    "butter",
    "pepper",
    "tiger",
    "rabbit",
    "falcon",
    "salmon",
    "turtle",
    "beetle",
    "dragon",
    "knight",
    "wizard",
]


@pytest.fixture(scope="module")
def edited_model(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A tiny random llama; in head `PLANTED`, keys and queries are one projection of the token.

    Equal tokens then match, wherever they are, because only the slowly rotating half of the
    position encoding is used.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model("llama")
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    attention = model.model.layers[PLANTED.layer].self_attn
    size = model.config.head_dim
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    slow = torch.tensor([i for i in range(size) if i % (size // 2) >= size // 4])
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        projection = torch.zeros(size, model.config.hidden_size)
        projection[slow] = torch.randn(len(slow), model.config.hidden_size) * 0.15
        start = PLANTED.head * size
        attention.q_proj.weight[start : start + size] = projection * 2
        start = PLANTED.head // group * size
        attention.k_proj.weight[start : start + size] = projection
    target = tmp_path_factory.mktemp("edited")
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return target


def queries(count: int) -> list[LabelledQuery]:
    """Each positive holds the query's two words among others; all documents are alike in length."""
    generator = random.Random(0)
    made = []
    for number in range(count):
        asked, other = generator.sample(WORDS, 2), generator.sample(WORDS, 30)
        rest = [word for word in other if word not in asked][:24]
        texts = [" ".join(generator.sample(rest[i * 6 : i * 6 + 6], 6)) for i in range(4)]
        texts[0] = " ".join([*asked, *texts[0].split()[:4]])
        documents = tuple(Document(text) for text in texts)
        made.append(LabelledQuery(f"q{number}", " ".join(asked), documents[:1], documents[1:]))
    return made


@pytest.fixture(scope="module")
def attention(edited_model: Path) -> Iterator[HeadAttention]:
    from hook_runtime.transformers_backend import TransformersBackend

    backend = TransformersBackend(str(edited_model), dtype="float32")
    yield measure_attention(backend, queries(24), MeasureSettings(window="all"))
    backend.close()


@pytest.mark.parametrize("method", METHODS)
def test_the_edited_head_is_found(attention: HeadAttention, method: Method) -> None:
    detection = find_heads(attention, Selection(count=1, method=method))
    assert detection.heads == (PLANTED,)
    assert detection.chosen.ndcg_at_10 > 0.95
    assert detection.held_out[1].ndcg_at_10 > 0.95
    assert detection.random.ndcg_at_10 < 0.85
    assert detection.stability is not None
    assert detection.stability.overlap == 1.0


def test_without_the_edit_no_head_finds_the_positives(tiny_model: Callable[[str], Path]) -> None:
    from hook_runtime.transformers_backend import TransformersBackend

    backend = TransformersBackend(str(tiny_model("llama")), dtype="float32")
    unedited = measure_attention(backend, queries(24), MeasureSettings(window="all"))
    backend.close()
    assert find_heads(unedited, Selection(count=1)).held_out[1].ndcg_at_10 < 0.9


@pytest.mark.parametrize("method", METHODS)
def test_detection_is_deterministic(attention: HeadAttention, method: Method) -> None:
    one, other = (find_heads(attention, Selection(count=3, method=method)) for _ in range(2))
    assert one.head_set() == other.head_set()
    assert one.held_out == other.held_out
    assert one.stability == other.stability


def test_measuring_twice_gives_the_same_numbers(edited_model: Path, tmp_path: Path) -> None:
    from hook_runtime.transformers_backend import TransformersBackend

    digests = []
    for name in "ab":
        backend = TransformersBackend(str(edited_model), dtype="float32")
        # A folder's path is its name: say what the model is, so that the stores can be equal.
        info = dataclasses.replace(backend.model, name="tiny/edited")
        measured = measure_attention(backend, queries(3), store=tmp_path / name, model=info)
        digests.append(measured.digest)
        backend.close()
    assert digests[0] == digests[1]
