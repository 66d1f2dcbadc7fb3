"""What is refused, at start-up or for one request, and what the message says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import start_engine
from prompts import QUERIES, capture_request, random_request

from hook_runtime.engine import HookLLM
from hook_runtime.errors import (
    ClosedError,
    ProbeError,
    UnsupportedModelError,
    UnsupportedVLLMError,
)
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_transfer_config": {"kv_connector": "X"}}, "kv_transfer_config cannot be combined"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config cannot be combined"),
        ({"data_parallel_size": 2}, "Use AsyncHookLLM or ThreadedHookLLM"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"worker_extension_cls": "user_extension.Clashing"}, "both define hook_runtime_take"),
        ({"layers": 2, "load_format": "gguf"}, "load_format='gguf' cannot skip layers"),
        ({"spec_model": "x", "spec_tokens": 2}, "spec_model cannot be combined"),
        ({"kv_offloading_size": 1.0}, "kv_offloading_size cannot be combined"),
    ],
)
def test_engine_arguments(
    arguments: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedVLLMError, match=message):
        start_engine(tiny_model("llama"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": "auto"}, "layers='auto' needs heads"),
        ({"layers": 5}, "from 1 to 4"),
        ({"layers": True}, "from 1 to 4"),
        ({"heads": ["one"]}, "not a head: 'one'"),
    ],
)
def test_heads_and_layers(
    arguments: dict[str, Any], message: str, tiny_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ProbeError, match=message):
        start_engine(tiny_model("llama"), **arguments)


def test_a_model_whose_attention_has_position_biases(tmp_path: Path, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    config = BloomConfig(vocab_size=49152, hidden_size=128, n_layer=2, n_head=4)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2_dir).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"layer 0 .*ALiBi.*transformers backend"):
        start_engine(tmp_path, enforce_eager=True)


def test_one_bad_request_stops_its_batch_before_it_runs(engine: HookLLM) -> None:
    good = capture_request(engine.tokenizer, QUERIES[0])
    missing = capture_request(engine.tokenizer, QUERIES[0], heads=(Head(30, 0),))
    with pytest.raises(ProbeError, match="head 30-0 does not exist in smollm2: it has layers 0-29"):
        engine.capture([good, missing])
    long = random_request(1024, (1000, 1010), ((0, 9),), (Head(1, 1),))
    with pytest.raises(ProbeError, match=r"1024 tokens; this engine takes at most 1023"):
        engine.capture([good, long])


def test_span_beyond_the_prompt(engine: HookLLM) -> None:
    probe = AttentionProbe((Head(1, 1),), (3, 9), ((0, 2),))
    with pytest.raises(ProbeError, match="ends at token 9, but the prompt has only 5 tokens"):
        engine.probe([{"prompt_token_ids": [1, 2, 3, 4, 5]}], [probe])


def test_probe_arguments(engine: HookLLM) -> None:
    from vllm import SamplingParams

    probe = AttentionProbe((Head(1, 1),), (3, 5), ((0, 2),))
    with pytest.raises(ProbeError, match="2 prompts but 1 probes"):
        engine.probe(["a", "b"], [None])
    with pytest.raises(ProbeError, match="2 prompts but 1 sampling parameters"):
        engine.probe(["a", "b"], [None, None], [SamplingParams()])
    with pytest.raises(ProbeError, match="one completion, not n=2"):
        engine.probe([[1, 2, 3, 4, 5]], [probe], SamplingParams(n=2))
    with pytest.raises(ProbeError, match="token ids only, but this one has cache_salt"):
        engine.probe([{"prompt_token_ids": [1, 2, 3, 4, 5], "cache_salt": "mine"}], [probe])
    with pytest.raises(ProbeError, match="text or token ids, not dict"):
        engine.probe([{"prompt_embeds": None}], [probe])


def test_small_engine(tiny_model: Callable[[str], Path]) -> None:
    """All heads in more than one chunk; a user's extension beside ours; use after close."""
    engine = start_engine(
        tiny_model("llama"),
        name="tiny",
        enforce_eager=True,
        max_num_batched_tokens=64,
        worker_extension_cls="user_extension.Fitting",
    )
    assert engine.llm.collective_rpc("twice", args=(21,)) == [42]
    request = random_request(65, (60, 64), ((0, 50),))
    with pytest.raises(ProbeError, match=r"65 tokens do not fit max_num_batched_tokens=64"):
        engine.capture([request])
    fitting = CaptureRequest(request.prompt_token_ids[:64], request.probe)
    assert engine.capture([fitting])[0].values.shape == (24, 50)
    engine.close()
    engine.close()
    for use in (lambda: engine.capture([fitting]), lambda: engine.generate(["a"])):
        with pytest.raises(ClosedError, match="closed"):
            use()
