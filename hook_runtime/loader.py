"""vLLM model loaders for an engine that keeps the first layers only, and reads them only.

``hf_overrides={"num_hidden_layers": N}`` alone makes vLLM refuse the checkpoint's other layers. Of
the last layer kept only queries and keys are read, so what would come after them is not computed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import compat

FIRST_LAYERS = "hook_runtime_first_layers"
FIRST_LAYERS_DUMMY = "hook_runtime_first_layers_dummy"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _Unchanged(nn.Module):
    """Stands for an MLP whose result nobody reads."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class _FirstNumber(nn.Module):
    """Stands for an output projection whose result nobody reads: no bias, no matrix product.

    It reads one number of each token, or the compiler would leave out the attention as well. The
    result is written out whole, because the norm after it may work in place.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, attended: torch.Tensor) -> tuple[torch.Tensor, None]:
        return attended[..., :1].repeat_interleave(self.width, dim=-1), None


def drop_unread(model: nn.Module, config: Any) -> bool:
    """Leave out what follows q and k in the last kept layer; False where its shape is unknown.

    The layer's attention is marked, so that the capture need not run it either.
    """
    last = f"layers.{config.num_hidden_layers - 1}"
    for name, layer in model.named_modules():
        if name != last and not name.endswith(f".{last}"):
            continue
        mlp = getattr(layer, "mlp", None)
        attention = getattr(layer, "self_attn", None)
        attend = getattr(attention, "attn", None)
        known = type(mlp).__name__.endswith("MLP") and hasattr(attention, "o_proj")
        if not known or attend is None or not compat.is_plain_attention(attend):
            return False
        layer.mlp = _Unchanged()
        attention.o_proj = _FirstNumber(config.hidden_size)  # type: ignore[union-attr]
        attend.hook_runtime_unread = True
        return True
    return False


def _register(load_format: str, as_format: str, module: str, base_name: str) -> None:
    base: Any = compat.symbol(f"vllm.model_executor.model_loader.{module}", base_name)
    register = compat.symbol("vllm.model_executor.model_loader", "register_model_loader")

    class FirstLayersLoader(base):
        """One of vLLM's loaders, without the layers at or past num_hidden_layers."""

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = as_format
            super().__init__(load_config)

        def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(vllm_config, model_config, *args, **kwargs)
            drop_unread(model, model_config.hf_text_config)
            return model

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            kept = model_config.hf_text_config.num_hidden_layers
            for name, weight in super().get_all_weights(model_config, model):
                layer = _LAYER.search(name)
                if layer is None or int(layer.group(1)) < kept:
                    yield name, weight

    register(load_format)(FirstLayersLoader)


_register(FIRST_LAYERS, "auto", "default_loader", "DefaultModelLoader")
_register(FIRST_LAYERS_DUMMY, "dummy", "dummy_loader", "DummyModelLoader")


def first_layers(config: Any, kept: int) -> dict[str, Any]:
    """``hf_overrides`` that cut a Hugging Face text config to its first ``kept`` layers.

    Lists with one entry a layer (``layer_types`` and its kin) are cut as well.
    """
    total = config.num_hidden_layers
    overrides: dict[str, Any] = {"num_hidden_layers": kept}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == total:
            overrides[name] = value[:kept]
    return overrides
