"""The independent reference for programs: transformers with forward hooks, in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from oracle import _model
from program_runs import Ran

from hook_runtime.interventions import Ablate, AddVector, Intervention, ProjectTo, ScaleHeads
from hook_runtime.probes import HeadOutputProbe, StateProbe
from hook_runtime.programs import Program

Change = Callable[[Any], Any]


def reference_states(
    model_dir: str | Path,
    tokens: Sequence[int],
    prompt_len: int,
    program: Program,
    dtype: Any = None,
) -> list[np.ndarray]:
    """What each probe must read in a request that computed these tokens.

    Shape: [layers or heads, rows, width] a probe. All layers must be named.
    """
    import torch

    model = _model(str(model_dir), dtype or torch.float32, "cpu")
    with _hooked(model, program, prompt_len) as (streams, outputs), torch.no_grad():
        model(torch.tensor([list(tokens)]), use_cache=False)
    answers = []
    for probe in program.probes:
        where = _positions(probe.positions, 0, None, prompt_len, len(tokens))
        if isinstance(probe, HeadOutputProbe):
            rows = [outputs[h.layer][0, where, h.head] for h in probe.heads]
        else:
            rows = [streams[i][0, where] for i in probe.layers]  # type: ignore[attr-defined]
        values = torch.stack(rows)
        if probe.reduce == "mean" and len(where):
            values = values.double().mean(dim=1, keepdim=True)
        answers.append(values.float().numpy())
    return answers


def reference_greedy(
    model_dir: str | Path, prompt: Sequence[int], program: Program, count: int
) -> list[int]:
    """The likeliest token each time, everything computed anew for each. All layers named."""
    import torch

    model = _model(str(model_dir), torch.float32, "cpu")
    tokens = list(prompt)
    with _hooked(model, program, len(prompt)), torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@contextlib.contextmanager
def _hooked(
    model: Any, program: Program, prompt_len: int
) -> Iterator[tuple[dict[int, Any], dict[int, Any]]]:
    """The model under the program's interventions; the last forward's streams and head outputs."""
    layers = model.model.layers
    streams: dict[int, Any] = {}
    outputs: dict[int, Any] = {}
    handles = []
    for index, layer in enumerate(layers):
        projection = layer.self_attn.o_proj
        heads = [i for i in program.interventions if isinstance(i, ScaleHeads)]
        own = [i for i in program.interventions if index in getattr(i, "layers", ())]
        handles += [
            projection.register_forward_pre_hook(
                lambda m, a, i=index, h=heads: _at_heads(a[0], i, h, prompt_len, model, outputs)
            ),
            layer.register_forward_hook(
                lambda m, a, o, n=own, i=index: _at_layer(o, i, n, prompt_len)
            ),
            layer.register_forward_pre_hook(
                lambda m, a, k, i=index: streams.update({i: (a[0] if a else k["hidden_states"])}),
                with_kwargs=True,
            ),
        ]
    handles.append(
        model.model.norm.register_forward_hook(lambda m, a, o: streams.update({len(layers): o}))
    )
    try:
        yield streams, outputs
    finally:
        for handle in handles:
            handle.remove()


def _at_layer(output: Any, index: int, own: list[Intervention], prompt_len: int) -> Any:
    whole = isinstance(output, tuple)
    states = output[0] if whole else output
    for item in own:
        where = _positions(
            item.positions, item.start_step, item.stop_step, prompt_len, states.shape[1]
        )
        if len(where):
            states = states.clone()
            states[0, where] = _changed(item, states[0, where].float(), index).to(states.dtype)
    return (states, *output[1:]) if whole else states


def _changed(item: Any, states: Any, index: int) -> Any:
    import torch

    vector = torch.tensor(item.vector.values)
    if vector.dim() == 2:
        vector = vector[list(item.layers).index(index)]
    if isinstance(item, AddVector):
        return states + item.coefficient * vector
    target = item.target if isinstance(item, ProjectTo) else 0.0
    assert isinstance(item, ProjectTo | Ablate)
    along = torch.outer(states @ vector, vector) / vector.dot(vector)
    return states - along + target * vector / vector.norm()


def _at_heads(
    states: Any, index: int, items: list[Any], prompt_len: int, model: Any, outputs: dict[int, Any]
) -> tuple[Any]:
    heads = states.view(*states.shape[:2], model.config.num_attention_heads, -1).clone()
    for item in items:
        where = _positions(
            item.positions, item.start_step, item.stop_step, prompt_len, states.shape[1]
        )
        for head in item.heads:
            if head.layer == index and len(where):
                heads[0, where, head.head] *= item.factor
    outputs[index] = heads
    return (heads.view(states.shape),)


def _positions(
    positions: Any, start_step: int, stop_step: int | None, prompt_len: int, count: int
) -> list[int]:
    """Token by token, from what the documentation says."""
    found = []
    for place in range(count):
        step = max(0, place - prompt_len + 1)
        if step < start_step or (stop_step is not None and step >= stop_step):
            continue
        generated = place >= prompt_len
        wanted = {
            "all": True,
            "prompt": not generated,
            "generated": generated,
            "last": place == prompt_len - 1,
        }
        inside = (
            wanted[positions]
            if isinstance(positions, str)
            else (positions[0] <= place < positions[1])
        )
        if inside:
            found.append(place)
    return found


def assert_ran(model_dir: str | Path, ran: Ran, prompt_len: int, tolerance: float = 2e-4) -> None:
    """Every state that a request read is what the reference computes from the same tokens."""
    references = reference_states(model_dir, ran.tokens, prompt_len, ran.program)
    assert_states(ran.states, references, ran.program.probes, tolerance)


def assert_states(
    states: Sequence[Any],
    references: Sequence[np.ndarray],
    probes: Sequence[StateProbe],
    tolerance: float = 2e-4,
) -> None:
    """Every token's row of every layer or head is right by its own size, not the largest one's."""
    assert len(states) == len(references) == len(probes)
    for read, expected in zip(states, references, strict=True):
        assert read.values.dtype == np.float32
        assert read.values.shape[:2] == expected.shape[:2], (read.probe, read.positions)
        if not expected.size:
            continue
        assert read.values.shape == expected.shape
        error = np.abs(read.values - expected).max(axis=-1)
        size = np.abs(expected).max(axis=-1)
        worst = np.unravel_index((error / (size + 1e-6)).argmax(), error.shape)
        assert (error <= tolerance * size + 1e-6).all(), (
            f"{read.probe}: row {worst} is off by {error[worst]:.2e} of {size[worst]:.2e}"
        )


def mean_distance(values: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """By layer or head: the mean over tokens of the distance, relative to the state's length."""
    distance = np.linalg.norm(values - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    return distance.mean(axis=-1)
