"""Doors in the residual stream: an opaque operation after every decoder layer.

A compiled model runs no Python between its layers, and a recorded CUDA graph none at all. So an
operation that the compiler cannot look into stands after each layer, before the model is compiled;
vLLM cuts its piecewise graphs there, as it does at attention. Where nobody is at a door it returns
at once, and a graph of a whole step records nothing of it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import compat
from .errors import UnsupportedModelError

OPERATION = "hook_runtime::door"
At = Callable[[int, torch.Tensor, torch.Tensor | None], None]
"""What stands at the doors: (index into the hidden states, hidden, residual). The stream is their
sum [tokens, hidden]; both may be changed in place."""

_library = torch.library.Library("hook_runtime", "FRAGMENT")
_at_doors: dict[int, At] = {}  # by the identity of the engine's table of layers


def _door(hidden: torch.Tensor, residual: torch.Tensor | None, index: int) -> None:
    if _at_doors:
        at = _at_doors.get(compat.engine_identity())
        if at is not None:
            at(index, hidden, residual)


def _door_meta(hidden: torch.Tensor, residual: torch.Tensor | None, index: int) -> None:
    return None


_library.define("door(Tensor(a!) hidden, Tensor(b!)? residual, int index) -> ()")
_library.impl("door", _door, "CompositeExplicitAutograd")
torch.library.register_fake(OPERATION, _door_meta, lib=_library)


def stand(engine: int, at: At) -> Callable[[], None]:
    """Let ``at`` see every door of the engine until the returned function is called."""
    _at_doors[engine] = at

    def leave() -> None:
        _at_doors.pop(engine, None)

    return leave


class Doorway:
    """The decoder layers of one loaded model, and the norm after the last.

    Raises UnsupportedModelError for layers whose output is not known to be the stream.

    Attributes:
        layers: those on this worker, by number.
        norm: the final norm, where the last layer is on this worker.
        last: index of the last hidden state, which comes after that norm.
    """

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        attention = compat.decoder_attention(vllm_config)
        self.layers = {
            index: _layer(model, index, name) for index, (name, _) in sorted(attention.items())
        }
        self.first = 0 in self.layers
        self.norm: nn.Module | None = None
        self.last = int(compat.hf_text_config(vllm_config).num_hidden_layers)
        if self.last - 1 in self.layers:
            self.norm = _final_norm(model, self.last - 1, attention[self.last - 1][0])

    @property
    def indices(self) -> set[int]:
        """Hidden states that pass here."""
        return {index + 1 for index in self.layers} | ({0} if self.first else set())

    def build(self) -> list[Any]:
        """Put the doors in; handles whose ``remove()`` takes them out again."""
        handles = []
        for index, layer in self.layers.items():
            if index == 0:
                hook = functools.partial(_before, _place_of_hidden(layer))
                handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
            handles.append(layer.register_forward_hook(functools.partial(_after, index + 1)))
        return handles


def _before(place: int, layer: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    hidden = args[place] if len(args) > place else kwargs["hidden_states"]
    torch.ops.hook_runtime.door(hidden, None, 0)


def _after(index: int, layer: nn.Module, args: Any, output: Any) -> None:
    if isinstance(output, tuple):
        torch.ops.hook_runtime.door(output[0], output[1], index)
    else:
        torch.ops.hook_runtime.door(output, None, index)


def _place_of_hidden(layer: nn.Module) -> int:
    return list(inspect.signature(type(layer).forward).parameters).index("hidden_states") - 1


def _layer(model: nn.Module, index: int, attention: str) -> nn.Module:
    """The decoder layer around an attention module of this name."""
    path = _path(index, attention)
    try:
        layer = model.get_submodule(path)
    except AttributeError as error:
        raise UnsupportedModelError(
            f"layer {index}: the model has no module {path} around its attention {attention}."
        ) from error
    if not compat.gives_out_the_stream(layer):
        raise UnsupportedModelError(
            f"hidden states cannot be read or changed in {type(layer).__name__}: it has not been "
            f"checked that its output is the residual stream. Checked: "
            f"{', '.join(sorted(compat.STREAM_LAYERS))}."
        )
    return layer


def _path(index: int, attention: str) -> str:
    parts = attention.split(".")
    return ".".join(parts[: parts.index(str(index)) + 1])


def _final_norm(model: nn.Module, index: int, attention: str) -> nn.Module:
    path = _path(index, attention).split(".")[:-2]
    norm = getattr(model.get_submodule(".".join(path)), "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedModelError(f"the model has no final norm {'.'.join([*path, 'norm'])}.")
    return norm
