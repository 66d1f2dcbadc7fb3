"""A vLLM model loader that skips the weights of layers the engine does not keep.

``hf_overrides={"num_hidden_layers": N}`` alone makes vLLM refuse the checkpoint's other layers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

from . import compat

LOAD_FORMAT = "hook_runtime_first_layers"
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def _register() -> None:
    base: Any = compat.symbol(
        "vllm.model_executor.model_loader.default_loader", "DefaultModelLoader"
    )
    register = compat.symbol("vllm.model_executor.model_loader", "register_model_loader")

    class FirstLayersLoader(base):
        """vLLM's default loader without the weights of layers at or past num_hidden_layers."""

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = "auto"
            super().__init__(load_config)

        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
            kept = model_config.hf_text_config.num_hidden_layers
            for name, weight in super().get_all_weights(model_config, model):
                layer = _LAYER.search(name)
                if layer is None or int(layer.group(1)) < kept:
                    yield name, weight

    register(LOAD_FORMAT)(FirstLayersLoader)


_register()


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
