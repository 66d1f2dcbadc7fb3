"""What crosses to vLLM and back: sampling parameters that carry probes, and workers' results."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import compat
from .errors import ProbeError
from .specs import AttentionProbe, CaptureRequest, Head
from .tracker import EXTRA_ARG


def one_token() -> Any:
    """Sampling parameters of a request that is there for its prefill alone."""
    params = compat.symbol("vllm", "SamplingParams")
    # Nobody else has them, and vLLM's deep copy takes longer than a short prompt's scheduling.
    return params(max_tokens=1, temperature=0.0, detokenize=False, skip_clone=True)


def per_prompt(given: Any, count: int, what: str) -> list[Any]:
    """One value a prompt, from one for all or a list of them; ``what`` names them in the error."""
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise ProbeError(f"{count} prompts but {len(given)} {what}: give one for all, or one each.")
    return list(given)


def with_probe(params: Any, capture_id: str, probe: AttentionProbe) -> Any:
    """A copy of the sampling parameters that carries the probe to the workers."""
    if params.n != 1:
        raise ProbeError(f"a probed request must ask for one completion, not n={params.n}.")
    params = with_whole_output(params)
    # vLLM copies deeply by itself, so the probe goes as one string
    params.extra_args = {
        **(params.extra_args or {}),
        EXTRA_ARG: {
            "id": capture_id,
            "whole": probe.heads == "all",
            "probe": json.dumps(probe.to_json()),
        },
    }
    if probe.heads == "all":  # never False here: vLLM sets True itself for prompt_logprobs
        params.skip_reading_prefix_cache = True
    return params


def with_whole_output(params: Any) -> Any:
    """A copy whose first output tells that the prompt is computed, and whose last holds it all."""
    params = copy.copy(params)
    params.output_kind = compat.symbol("vllm.sampling_params", "RequestOutputKind").CUMULATIVE
    return params


def gives_deltas(params: Any) -> bool:
    """Whether each output has only the tokens since the last one."""
    return params.output_kind == compat.symbol("vllm.sampling_params", "RequestOutputKind").DELTA


def merge_ranks(ranks: list[dict[str, Any]], request: CaptureRequest) -> dict[str, Any]:
    """One request's results from every worker: heads in the probe's order, or what went wrong.

    A worker of another data-parallel engine knows nothing of the request and answers ``{}``.
    """
    known = [rank for rank in ranks if rank]
    if not known:
        return {"incomplete": "no worker has a result for it (was it aborted from outside?)"}
    for rank in known:
        if "values" not in rank:
            return rank
    rows: dict[Head, np.ndarray] = {}
    total = np.zeros((1, request.probe.num_columns), np.float32)
    for rank in known:
        heads = [Head(*h) for h in rank["heads"]]
        values = np.frombuffer(rank["values"], np.float32).reshape(-1, total.shape[1])
        if request.probe.sum_heads:
            total = total + values
            values = [total] * len(heads)
        rows.update(zip(heads, values, strict=True))
    wanted = sorted(rows) if request.probe.heads == "all" else request.probe.heads
    missing = [str(h) for h in wanted if h not in rows]
    if missing or not wanted:
        what = f"head {' '.join(missing)}" if missing else "any head"
        return {"incomplete": f"no worker holds {what}"}
    values = total if request.probe.sum_heads else np.stack([rows[h] for h in wanted])
    return {"heads": tuple(wanted), "values": values}
