"""What one attention layer of a loaded vLLM model looks like, and which layers are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import compat
from .errors import UnsupportedModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class LayerGeometry:
    """One decoder layer on this worker; head numbers are local unless said otherwise.

    Attributes:
        layer: layer number in the model.
        name: vLLM's name of the attention module.
        group, block_size: KV-cache group and its tokens a block.
        num_heads, num_kv_heads, head_dim: sizes on this tensor-parallel rank.
        first_head: global number of local head 0.
        scale: factor on q.k before the softmax.
        window: a row at position i sees keys i-window+1..i; None sees all.
        softcap: logits become softcap * tanh(logits / softcap); None leaves them.
        sinks: float tensor [num_heads], an extra logit per head in the softmax; or None.
        unread: nothing reads what the layer's attention gives, so it need not run.
    """

    layer: int
    name: str
    impl: Any
    group: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_head: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None
    unread: bool = False

    @property
    def heads_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    def has(self, head: int) -> bool:
        """Whether the head with this global number lives on this worker."""
        return self.first_head <= head < self.first_head + self.num_heads

    def stand_in(self, forward: Callable[..., Any]) -> Callable[[], None]:
        """Have ``forward`` called in place of the layer's own, until what is returned is called."""
        impl = self.impl
        original, own = impl.forward, "forward" in vars(impl)

        def undo() -> None:
            if own:
                impl.forward = original
            else:
                del impl.forward

        impl.forward = forward
        return undo


def _refuse(layer: int, name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer} ({name}) cannot be captured exactly: {reason}. "
        "Use the transformers backend, or another model."
    )


def check_exact(layer: int, name: str, module: Any, model_dtype: str) -> None:
    """Raise UnsupportedModelError for a layer whose probabilities q, k and scale do not give."""
    impl = module.impl
    reason = None
    if not compat.is_plain_attention(module):
        reason = f"its attention is {type(module).__name__}, not a causal or sliding-window one"
    elif getattr(module, "kv_sharing_target_layer_name", None) is not None:
        reason = f"it reads the keys of {module.kv_sharing_target_layer_name}"
    elif getattr(impl, "alibi_slopes", None) is not None:
        reason = "it uses ALiBi position biases"
    elif getattr(module, "query_quant", None) is not None:
        reason = "its queries are quantised to fp8"
    elif str(getattr(module, "kv_cache_dtype", "auto")) not in ("auto", model_dtype):
        reason = (
            f"its KV cache holds {module.kv_cache_dtype}, not the model's {model_dtype}: "
            "set kv_cache_dtype='auto'"
        )
    elif getattr(impl, "chunk_lookback", -1) > -1:
        reason = "it attends within chunks (chunk_lookback)"
    elif getattr(impl, "dual_chunk_attention_config", None) is not None:
        reason = "it uses dual-chunk attention"
    if reason is not None:
        raise _refuse(layer, name, reason)


def read_geometry(vllm_config: Any, model_runner: Any) -> dict[int, LayerGeometry]:
    """Layer number -> geometry of every decoder self-attention layer on this worker."""
    _, groups = compat.kv_groups(model_runner)
    group_of = {name: (g, size) for g, (names, size) in enumerate(groups) for name in names}
    rank = compat.tensor_parallel_rank()
    model_dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    found: dict[int, LayerGeometry] = {}
    for layer, (name, module) in sorted(compat.decoder_attention(vllm_config).items()):
        check_exact(layer, name, module, model_dtype)
        if name not in group_of:
            raise _refuse(layer, name, "it has no KV cache of its own")
        group, block_size = group_of[name]
        impl = module.impl
        softcap = getattr(impl, "logits_soft_cap", None) or getattr(impl, "soft_cap", None)
        found[layer] = LayerGeometry(
            layer=layer,
            name=name,
            impl=impl,
            group=group,
            block_size=block_size,
            num_heads=module.num_heads,
            num_kv_heads=module.num_kv_heads,
            head_dim=module.head_size,
            first_head=rank * module.num_heads,
            scale=float(compat.attribute(impl, "scale")),
            window=getattr(module, "sliding_window", None) or None,
            softcap=float(softcap) if softcap else None,
            sinks=getattr(impl, "sinks", None),
            unread=getattr(module, "hook_runtime_unread", False),
        )
    if not found:
        kinds = sorted({type(m).__name__ for m in _attention_like(vllm_config).values()})
        raise UnsupportedModelError(
            f"no decoder self-attention with readable keys in this model (found: "
            f"{', '.join(kinds) or 'none'}). Multi-head latent attention (MLA) and state-space "
            "models cannot be captured."
        )
    return found


def _attention_like(vllm_config: Any) -> Mapping[str, Any]:
    return compat.attribute(vllm_config.compilation_config, "static_forward_context")
