"""docs/refusals.md says what the code says: every message in it is produced here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")

from hook_runtime import compat
from hook_runtime.errors import HookRuntimeError, UnsupportedModelError
from hook_runtime.exchange import with_probe
from hook_runtime.geometry import check_exact, read_geometry
from hook_runtime.options import check_running, engine_options
from hook_runtime.session import Session
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head, ModelInfo
from hook_runtime.tracker import Tracker

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"
PROBE = AttentionProbe((Head(0, 0),), (3, 5), ((0, 2),))
MODEL = ModelInfo("tiny", None, 4, 2, 6, 512, "float32", "cpu", "vllm")


def _documented() -> dict[str, str]:
    """First column of every table's row -> its message."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {given.strip("`"): message for given, message in rows if message != "message"}


def _option(name: str, value: Any) -> Callable[[], object]:
    return lambda: engine_options("nowhere", (), None, {name: value})


def _layer(impl: dict[str, Any] | None = None, **module: Any) -> Callable[[], object]:
    values = {"impl": SimpleNamespace(**(impl or {})), "kv_cache_dtype": "auto", **module}
    return lambda: check_exact(0, "layers.0.attn", SimpleNamespace(**values), "float32")


def _turned_on() -> None:
    parallel = SimpleNamespace(use_ubatching=True, data_parallel_size=1)
    check_running(SimpleNamespace(parallel_config=parallel))


def _no_attention() -> None:
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layers.0": object()}),
        model_config=SimpleNamespace(dtype="torch.float32"),
    )
    cache = SimpleNamespace(num_blocks=1, kv_cache_groups=[])
    read_geometry(config, SimpleNamespace(kv_cache_config=cache))


def _embeddings() -> None:
    """The worker answers with the message; `HookLLM` raises it."""
    new = SimpleNamespace(
        req_id="r",
        prompt_token_ids=None,
        block_ids=([],),
        num_computed_tokens=0,
        lora_request=None,
        sampling_params=SimpleNamespace(extra_args={"hook_runtime": {"id": "1"}}),
    )
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[])
    output = SimpleNamespace(
        finished_req_ids=[],
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r": 1},
    )
    (rejected,) = Tracker([16]).step(output)[1]
    raise HookRuntimeError(rejected.reason)


def _session(*, lora: bool = False, chunk: int = 0) -> Session:
    scheduler = SimpleNamespace(
        max_num_batched_tokens=9, max_num_seqs=4, long_prefill_token_threshold=chunk
    )
    config = SimpleNamespace(scheduler_config=scheduler, lora_config="set" if lora else None)
    return Session(MODEL, config, [{"heads": [6] * 4}])


def _adapter() -> None:
    request = CaptureRequest(tuple(range(8)), PROBE)
    _session().check(request, SimpleNamespace(lora_name="mine"))


def _every_head(tokens: int, *, chunk: int = 0) -> Callable[[], object]:
    request = CaptureRequest(tuple(range(tokens)), AttentionProbe("all", (3, 5), ((0, 2),)))
    return lambda: _session(chunk=chunk).check(request)


CASES: dict[str, Callable[[], object]] = {
    "kv_transfer_config": _option("kv_transfer_config", {"kv_connector": "X"}),
    "kv_offloading_size": _option("kv_offloading_size", 1.0),
    "speculative_config": _option("speculative_config", {"method": "ngram"}),
    "spec_model": _option("spec_model", "x"),
    "spec_method": _option("spec_method", "ngram"),
    "enable_dbo": _option("enable_dbo", True),
    "decode_context_parallel_size": _option("decode_context_parallel_size", 2),
    "prefill_context_parallel_size": _option("prefill_context_parallel_size", 2),
    "data_parallel_size": _option("data_parallel_size", 2),
    "a mode that other arguments turned on": _turned_on,
    "ALiBi": _layer({"alibi_slopes": [1.0]}),
    "fp8 KV cache": _layer(kv_cache_dtype="fp8"),
    "fp8 queries": _layer(query_quant=object()),
    "keys shared between layers": _layer(kv_sharing_target_layer_name="layers.0.attn"),
    "attention within chunks": _layer({"chunk_lookback": 1}),
    "dual-chunk attention": _layer({"dual_chunk_attention_config": {}}),
    "another kind of attention": _layer(),
    "MLA, state-space models": _no_attention,
    "a head that does not exist": lambda: MODEL.check_heads([Head(9, 0)]),
    "a head beyond the layers kept": lambda: MODEL.check_heads([Head(3, 0)]),
    "a span past the prompt's end": lambda: CaptureRequest((1, 2, 3), PROBE),
    "several completions (`n`)": lambda: with_probe(SimpleNamespace(n=2), "1", PROBE),
    "embeddings or images": _embeddings,
    "a LoRA request where `enable_lora` is off": _adapter,
    "all heads of a prompt longer than a step": _every_head(10),
    "all heads of a prompt longer than a chunk": _every_head(9, chunk=5),
    "with and without an adapter in one call": lambda: _session(lora=True).check_mixture([1, None]),
    "without an adapter, to AsyncHookLLM": lambda: _session(lora=True).check_apart(None),
}


def test_every_documented_refusal_is_tested_and_no_other() -> None:
    assert sorted(_documented()) == sorted(CASES)


@pytest.mark.parametrize("given", CASES)
def test_the_message_is_the_documented_one(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = given != "another kind of attention"
    monkeypatch.setattr(compat, "is_plain_attention", lambda _: plain)
    monkeypatch.setattr(compat, "tensor_parallel_rank", lambda: 0)
    with pytest.raises(HookRuntimeError) as caught:
        CASES[given]()
    message, text = str(caught.value), _documented()[given]
    pattern = ".+".join(map(re.escape, text.split("…")))
    if isinstance(caught.value, UnsupportedModelError) and not text.endswith("."):
        pattern = (
            rf"layer 0 \(layers\.0\.attn\) cannot be captured exactly: {pattern}\. "
            r"Use the transformers backend, or another model\."
        )
    assert re.fullmatch(pattern, message), message
