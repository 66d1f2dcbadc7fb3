"""What goes wrong mid-batch must neither surface later nor return partial numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from parity import assert_exact
from prompts import QUERIES, capture_request

from hook_runtime import IncompleteCaptureError
from hook_runtime.engine import HookLLM
from hook_runtime.exchange import one_token
from hook_runtime.session import Ask

pytestmark = pytest.mark.engine

Reference = Callable[[Any], list[np.ndarray]]


def test_an_interrupted_batch_does_not_surface_in_the_next(
    cold_engine: HookLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [capture_request(cold_engine.tokenizer, q) for q in QUERIES[:3]]
    with monkeypatch.context() as patched:

        def interrupt() -> Any:
            raise KeyboardInterrupt

        patched.setattr(cold_engine.llm.llm_engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cold_engine.capture(requests)
    assert cold_engine.llm.llm_engine.get_num_unfinished_requests() == 0
    captures = cold_engine.capture(requests[1:])
    assert_exact(captures, reference(requests[1:]), requests[1:])


def test_a_prefix_nobody_captured_is_computed_again(
    cold_engine: HookLLM, reference: Reference
) -> None:
    """An ordinary request under the captures' own salt: the fault that the salt keeps out."""
    from vllm import SamplingParams

    (request,) = [capture_request(cold_engine.tokenizer, QUERIES[0])]
    submission = cold_engine._session.submission(Ask(request, one_token()))
    prompt = {
        "prompt_token_ids": list(request.prompt_token_ids),
        "cache_salt": submission.prompt["cache_salt"],
    }
    cold_engine.llm.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
    (capture,) = cold_engine.capture([request])
    assert capture.recomputed
    assert capture.cached_tokens == 0
    assert_exact([capture], reference([request]), [request])
    for cached in (False, True):  # the stale cache is left for good
        (again,) = cold_engine.capture([request])
        assert not again.recomputed
        assert (again.cached_tokens > 0) == cached
        assert_exact([again], reference([request]), [request])


INCOMPLETE = (
    r"the capture of 7 heads for a prompt of \d{3} tokens stayed incomplete after it was computed "
    r"2 times: no worker has a result for it.* name all of them when the engine starts"
)


def test_what_stays_incomplete_raises(
    cold_engine: HookLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request,) = [capture_request(cold_engine.tokenizer, QUERIES[0])]
    original = cold_engine.llm.collective_rpc

    def lossy(method: str, *args: Any, **kwargs: Any) -> Any:
        result = original(method, *args, **kwargs)
        return [[{} for _ in rank] for rank in result] if method == "hook_runtime_take" else result

    monkeypatch.setattr(cold_engine.llm, "collective_rpc", lossy)
    with pytest.raises(IncompleteCaptureError, match=INCOMPLETE):
        cold_engine.capture([request])


def test_prompt_logprobs_beside_a_probe(cold_engine: HookLLM) -> None:
    """vLLM keeps such requests away from the prefix cache; a probe must not undo that."""
    from vllm import SamplingParams

    (request,) = [capture_request(cold_engine.tokenizer, QUERIES[1])]
    prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)

    def logprobs(outputs: Any) -> list[float]:
        return [next(iter(p.values())).logprob for p in outputs[0].prompt_logprobs[1:]]

    alone = logprobs(cold_engine.generate([prompt], params))
    for _ in range(2):
        probed = cold_engine.probe([prompt], [request.probe], params)
        np.testing.assert_allclose(logprobs(probed.outputs), alone, rtol=1e-3, atol=1e-3)


def test_a_garbled_probe_is_answered_and_its_request_served(cold_engine: HookLLM) -> None:
    from vllm import SamplingParams

    garbled = SamplingParams(max_tokens=4, temperature=0.0, extra_args={"hook_runtime": {"id": 1}})
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9]}
    (with_it,) = cold_engine.llm.generate([prompt], garbled, use_tqdm=False)
    (without,) = cold_engine.llm.generate([prompt], plain, use_tqdm=False)
    assert with_it.outputs[0].token_ids == without.outputs[0].token_ids
    (answer,) = cold_engine.llm.collective_rpc("hook_runtime_take", args=(["1"], []))[0]
    assert "not a probe of version 2" in answer["error"]
