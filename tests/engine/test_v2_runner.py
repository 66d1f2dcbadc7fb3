"""vLLM's V2 model runner (the GPU default), driven on the CPU: the same numbers as the oracle."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="needs vLLM: pip install 'core-rerank[cpu]'")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton for its interpreter", allow_module_level=True)

HERE = Path(__file__).parent
LAYERS = 3

SCRIPT = """
import json, sys
from hook_runtime import AttentionProbe, CaptureRequest, HookLLM

def requests(prompts, heads):
    spans = [(0, 20), (24, 40)]
    return [CaptureRequest(tuple(p), AttentionProbe(heads, (len(p) - 6, len(p) - 1), spans))
            for p in prompts]

if __name__ == "__main__":
    model, prompts, heads, layers = json.loads(sys.argv[1])
    with HookLLM(model, heads=heads, dtype="float32", max_model_len=256, enforce_eager=True,
                 layers=layers, kv_cache_memory_bytes=1 << 26, max_num_batched_tokens=48,
                 max_num_seqs=4) as llm:
        rounds = [llm.capture(requests(prompts, heads)) for _ in range(2)]
        whole = llm.capture(requests(prompts[2:], "all"))
        print("RESULT " + json.dumps({
            "runner": llm.runner,
            "values": [[c.values.tolist() for c in captures] for captures in rounds],
            "whole": whole[0].values.tolist(),
            "cached": [[c.cached_tokens for c in captures] for captures in rounds],
        }))
"""


def _on_v2(folder: Path, script: str, arguments: Any) -> dict[str, Any]:
    """What the script prints as its result when the V2 runner is made to run on the CPU."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(HERE / "v2_on_cpu"), str(HERE.parents[1]), *filter(None, sys.path)]
        ),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    done = subprocess.run(
        [sys.executable, str(path), json.dumps(arguments), str(HERE.parent)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("RESULT "))


PROGRAMS = """
import json, sys
sys.path.insert(0, sys.argv[2])
from program_runs import greedy, run_programs
from hook_runtime import HookLLM
from hook_runtime.interventions import AddVector, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe
from hook_runtime.programs import Program

if __name__ == "__main__":
    model, prompts, vector = json.loads(sys.argv[1])
    probes = [HiddenStateProbe("all", positions="all"), HeadOutputProbe(["1-1"], positions="all")]
    steering = [AddVector([1], vector, 2.0), ProjectTo([2], vector, 1.0, positions="generated"),
                ScaleHeads(["1-1", "3-0"], 0.0)]
    with HookLLM(model, dtype="float32", max_model_len=256, enforce_eager=True,
                 kv_cache_memory_bytes=1 << 26, max_num_batched_tokens=48, max_num_seqs=4) as llm:
        programs = [Program(probes, steering), None, Program(probes)]
        for _ in range(2):
            ran = run_programs(llm, prompts, programs, greedy(5))
        print("RESULT " + json.dumps({
            "runner": llm.runner,
            "tokens": [r.tokens for r in ran],
            "values": [[s.values.tolist() for s in r.states] for r in ran],
        }))
"""


def test_programs_on_the_v2_runner(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    import numpy as np
    from program_oracle import assert_states, reference_states

    from hook_runtime.interventions import AddVector, ProjectTo, ScaleHeads
    from hook_runtime.probes import HeadOutputProbe, HiddenStateProbe, States
    from hook_runtime.programs import Program

    generator = np.random.default_rng(0)
    prompts = [generator.integers(100, 40_000, n).tolist() for n in (70, 20, 31)]
    vector = generator.standard_normal(192).tolist()
    folder = tiny_model("llama")
    result = _on_v2(tmp_path, PROGRAMS, [str(folder), prompts, vector])
    assert result["runner"].startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))
    probes = (
        HiddenStateProbe(range(5), positions="all"),
        HeadOutputProbe(["1-1"], positions="all"),
    )
    steering = [
        AddVector([1], vector, 2.0),
        ProjectTo([2], vector, 1.0, positions="generated"),
        ScaleHeads(["1-1", "3-0"], 0.0),
    ]
    for i, program in ((0, Program(probes, steering)), (2, Program(probes))):
        tokens = result["tokens"][i]
        references = reference_states(folder, tokens, len(prompts[i]), program)
        read = [
            States(probe, (0, len(tokens)), np.array(values, np.float32))
            for probe, values in zip(probes, result["values"][i], strict=True)
        ]
        assert_states(read, references, probes)


def test_v2_runner_matches_the_oracle(smollm2_dir: Path, tmp_path: Path) -> None:
    import numpy as np
    from oracle import reference_attention

    from hook_runtime import AttentionProbe, CaptureRequest

    generator = np.random.default_rng(0)
    shared = generator.integers(100, 40_000, 64).tolist()
    prompts = [shared + generator.integers(100, 40_000, n).tolist() for n in (9, 31)]
    prompts.append(generator.integers(100, 40_000, 45).tolist())
    heads = ["0-1", "2-0", "2-7"]
    result = _on_v2(tmp_path, SCRIPT, [str(smollm2_dir), prompts, heads, LAYERS])
    assert result["runner"].startswith(("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu."))

    def request(prompt: list[int], chosen: object) -> CaptureRequest:
        span = (len(prompt) - 6, len(prompt) - 1)
        return CaptureRequest(tuple(prompt), AttentionProbe(chosen, span, ((0, 20), (24, 40))))  # type: ignore[arg-type]

    expected = reference_attention(smollm2_dir, [request(p, heads) for p in prompts])
    for captured in result["values"]:
        for got, want in zip(captured, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * want.max())
    assert result["cached"][1][0] >= 64
    assert result["cached"][0][0] == 0
    (every,) = reference_attention(smollm2_dir, [request(prompts[2], "all")])
    kept = every[: len(result["whole"])]
    assert len(kept) == LAYERS * 9
    np.testing.assert_allclose(result["whole"], kept, rtol=0, atol=1e-4 * kept.max())
