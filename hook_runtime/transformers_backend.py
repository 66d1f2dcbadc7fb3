"""`CaptureBackend` on plain transformers: the way where vLLM does not install, on any device."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .errors import ClosedError, IncompleteCaptureError, ProbeError, UnsupportedModelError
from .specs import AttentionProbe, Capture, CaptureRequest, Head, ModelInfo, reduce_values

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "auto")
# One layer's attention of one chunk, [heads, rows, keys] in float32, stays below 256 MiB.
MAX_ATTENTION_ELEMENTS = 1 << 26


class TransformersBackend:
    """Reads attention from transformers' own eager forward, one request at a time.

    Exact by construction: a value is the weight that the model's eager attention function
    returned (scale, soft-cap, window and sinks included, softmax in float32, rounded to ``dtype``
    as the model does), averaged in float32. Only one layer's attention exists at any time, and
    long prompts run in chunks of query rows.
    """

    def __init__(
        self,
        model: str,
        *,
        name: str | None = None,
        revision: str | None = None,
        dtype: str = "float32",
        device: str | None = None,
        heads: Iterable[object] | None = None,
        layers: int | Literal["auto"] | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Load the model with eager attention.

        Args:
            model: Hugging Face id or local folder.
            name: what `ModelInfo` calls the model; ``model`` by default.
            revision: commit, tag or branch of a Hugging Face id.
            dtype: "float32", "bfloat16", "float16" or "auto" (the checkpoint's own).
            device: a torch device; by default "cuda" where there is one, else "cpu".
            heads: the heads that will be asked for: checked now, and needed by
                ``layers="auto"``. Any head of the kept layers may be asked for later.
            layers: keep only the first ``layers`` layers; "auto" keeps those up to the last of
                ``heads``; None keeps all.
            max_model_len: longest prompt in tokens; by default the model's own.

        Raises:
            ProbeError: a head does not exist or lies beyond the kept layers.
            UnsupportedModelError: the model does not expose its attention weights.
            ValueError: an argument is out of range.
        """
        import torch

        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}.")
        chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._lock = threading.Lock()
        self._reader: _Reader | None = None
        self._max_elements = MAX_ATTENTION_ELEMENTS
        self._decoder: Any
        self._decoder, self._tokenizer = _load(model, revision, dtype, torch.device(chosen))
        config = self._decoder.config.get_text_config()
        wanted = None if heads is None else [Head.parse(h) for h in heads]
        self._model = ModelInfo(
            name=name or model,
            revision=revision or getattr(config, "_commit_hash", None),
            num_layers=len(self._decoder.layers),
            layers_kept=_layers_to_keep(layers, wanted, len(self._decoder.layers)),
            num_heads=config.num_attention_heads,
            max_model_len=_length_limit(max_model_len, config.max_position_embeddings),
            dtype=str(next(self._decoder.parameters()).dtype).removeprefix("torch."),
            device=str(chosen),
            backend="transformers",
        )
        self._model.check_heads(wanted or ())
        self._decoder.layers = self._decoder.layers[: self._model.layers_kept]
        config.num_hidden_layers = self._model.layers_kept
        for index, layer in enumerate(self._decoder.layers):
            self._watch(index, layer)
        self._check_weights_are_returned()

    @property
    def model(self) -> ModelInfo:
        """The model that is loaded."""
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._tokenizer

    def capture(
        self, requests: Sequence[CaptureRequest], *, progress: bool = False
    ) -> list[Capture]:
        """Run the requests one after the other; captures in request order.

        ``heads="all"`` reads every head of the kept layers. Safe to call from several threads:
        they take turns. ``progress`` shows a bar on stderr.

        Raises:
            ProbeError: a head does not exist here, or a prompt is longer than ``max_model_len``;
                checked for every request before the first one runs.
            ClosedError: the backend was closed.
        """
        from tqdm import tqdm

        for index, request in enumerate(requests):
            self._check(index, request)
        with self._lock:
            if self._decoder is None:
                raise ClosedError(
                    f"the transformers backend for {self._model.name} was closed: create a new one."
                )
            bar = tqdm(requests, desc="attention", unit="prompt", disable=not progress)
            return [self._run(request) for request in bar]

    def close(self) -> None:
        """Free the model; further calls raise ClosedError. May be called twice."""
        with self._lock:
            self._decoder = None

    def _check(self, index: int, request: CaptureRequest) -> None:
        length = len(request.prompt_token_ids)
        if length > self._model.max_model_len:
            raise ProbeError(
                f"request {index} has a prompt of {length} tokens, but {self._model.name} takes "
                f"at most {self._model.max_model_len} here: shorten it or raise max_model_len."
            )
        if request.probe.heads != "all":
            self._model.check_heads(request.probe.heads)

    def _run(self, request: CaptureRequest) -> Capture:
        probe = request.probe
        heads = self._all_heads() if probe.heads == "all" else probe.heads
        reader = _Reader(heads, probe.query_span)
        # No row looks past itself, so the prompt may end with the last query row.
        self._forward(request.prompt_token_ids[: probe.query_span[1]], reader)
        reader.check_complete()
        return Capture(tuple(heads), _reduce(reader, heads, probe))

    def _all_heads(self) -> tuple[Head, ...]:
        info = self._model
        return tuple(Head(i, h) for i in range(info.layers_kept) for h in range(info.num_heads))

    def _forward(self, token_ids: Sequence[int], reader: _Reader) -> None:
        """Prefill ``token_ids`` in chunks while ``reader`` sees each layer's weights."""
        import torch
        from transformers import DynamicCache

        rows = max(1, self._max_elements // (self._model.num_heads * len(token_ids)))
        cache = DynamicCache() if rows < len(token_ids) else None
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        self._reader = reader
        try:
            with torch.inference_mode():
                for start in range(0, len(token_ids), rows):
                    reader.start = start
                    self._decoder(
                        input_ids=ids[:, start : start + rows],
                        past_key_values=cache,
                        use_cache=cache is not None,
                    )
        finally:
            self._reader = None

    def _watch(self, index: int, layer: Any) -> None:
        """Hand the weights of this layer to the reader, then drop them from the output."""
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            raise UnsupportedModelError(
                f"layer {index} of {self._model.name} has no self-attention (it is a "
                f"{type(layer).__name__}): only models with attention in every layer are supported."
            )

        def hook(_module: Any, _args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
            if self._reader is not None:
                self._reader.read(index, output[1])
            return (output[0], None, *output[2:])

        attention.register_forward_hook(hook)

    def _check_weights_are_returned(self) -> None:
        """Read one tiny prompt now, so that an unsuitable model is refused at start-up."""
        reader = _Reader(self._all_heads(), (1, 2))
        self._forward((0, 0), reader)
        reader.check_complete()


class _Reader:
    """Adds up the query rows of the wanted heads while the layers run.

    ``sums`` maps a layer to float32 [its wanted heads, keys]: the attention of the query rows
    seen so far, summed; ``start`` is the position of the running chunk's first row.
    """

    def __init__(self, heads: Iterable[Head], query_span: tuple[int, int]) -> None:
        self.by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            self.by_layer.setdefault(layer, []).append(head)
        self.query_span = query_span
        self.sums: dict[int, torch.Tensor] = {}
        self.rows: dict[int, int] = {}
        self.start = 0

    def read(self, layer: int, weights: torch.Tensor | None) -> None:
        """Take a layer's weights [1, heads, rows, keys]; the last row's own key comes last."""
        if layer not in self.by_layer:
            return
        if weights is None:
            raise UnsupportedModelError(
                "transformers returned no attention weights although eager attention was asked "
                "for: this architecture cannot be read, use another model or backend."
            )
        rows, keys = weights.shape[2:]
        first = max(self.query_span[0], self.start)
        last = min(self.query_span[1], self.start + rows)
        if first >= last:
            return
        import torch

        wanted = torch.tensor(self.by_layer[layer], device=weights.device)
        part = weights[0, :, first - self.start : last - self.start].index_select(0, wanted)
        added = part.float().sum(dim=1)
        if layer not in self.sums:
            self.sums[layer] = added.new_zeros(len(wanted), self.query_span[1])
        # A key the cache dropped lies outside the window; the others end at the chunk's last row.
        end = self.start + rows
        self.sums[layer][:, end - keys : end] += added
        self.rows[layer] = self.rows.get(layer, 0) + last - first

    def check_complete(self) -> None:
        """Raise IncompleteCaptureError unless every wanted layer gave every query row."""
        expected = self.query_span[1] - self.query_span[0]
        for layer in self.by_layer:
            if self.rows.get(layer, 0) != expected:
                raise IncompleteCaptureError(
                    f"layer {layer} gave {self.rows.get(layer, 0)} of {expected} "
                    "query rows: the model did not run its layers in the usual way."
                )


def _reduce(reader: _Reader, heads: Sequence[Head], probe: AttentionProbe) -> Any:
    """float32 numpy [heads, columns]: the mean over query rows, restricted to the spans."""
    import torch

    count = probe.query_span[1] - probe.query_span[0]
    place = {
        Head(layer, head): reader.sums[layer][row]
        for layer, wanted in reader.by_layer.items()
        for row, head in enumerate(wanted)
    }
    means = torch.stack([place[head] for head in heads]) / count
    # Keys after the last query row are seen by no row.
    means = torch.nn.functional.pad(means, (0, max(0, probe.spans[-1][1] - means.shape[1])))
    columns = torch.cat([means[:, start:stop] for start, stop in probe.spans], dim=1)
    return reduce_values(columns.cpu().numpy(), probe)


def _load(model: str, revision: str | None, dtype: str, device: torch.device) -> tuple[Any, Any]:
    """The text decoder with eager attention, without its output head, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model, revision=revision, dtype=dtype, attn_implementation="eager"
    )
    decoder: Any = loaded.get_decoder()
    heads = getattr(decoder.config.get_text_config(), "num_attention_heads", None)
    if heads is None or not hasattr(decoder, "layers"):
        raise UnsupportedModelError(
            f"{model} is a {type(decoder).__name__} without a list of attention layers: "
            "only decoder-only transformers are supported."
        )
    return decoder.to(device).eval(), tokenizer


def _layers_to_keep(
    layers: int | Literal["auto"] | None, heads: list[Head] | None, total: int
) -> int:
    if layers is None:
        return total
    if layers == "auto":
        if not heads:
            raise ProbeError("layers='auto' needs heads: name the heads that will be asked for.")
        return min(total, max(head.layer for head in heads) + 1)
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= total:
        raise ProbeError(f"layers must be 'auto', None or 1 to {total}, not {layers!r}.")
    return layers


def _length_limit(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= limit:
        raise ValueError(f"max_model_len must be 1 to the model's {limit}, not {asked!r}.")
    return asked
