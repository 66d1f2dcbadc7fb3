"""The worker's capture: wraps the attention layers and the step, scores, and keeps the results."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from . import compat
from .geometry import LayerGeometry, read_geometry
from .shadow import LayerShadow, Segment, buckets, page_index
from .specs import Head, reduce_columns
from .tracker import Chunk, Missing, ProbedRequest, Tracker
from .whole import WholePrompt

logger = logging.getLogger(__name__)

MAX_RESULTS = 100_000
# Elements of one layer's logits or gathered keys in one bucket, whichever are more: with their
# copies about 100 MB on a CPU, 400 MB on a GPU, where more small kernels would cost more.
BUCKET_BUDGET = {"cpu": 16_000_000, "cuda": 64_000_000}


class CaptureState:
    """One per worker. Lives on the model runner's ``execute_model`` and the layers' ``forward``."""

    def __init__(self, vllm_config: Any, model_runner: Any, device: torch.device) -> None:
        self.device = device
        self.geometry = read_geometry(vllm_config, model_runner)
        self.dtype = vllm_config.model_config.dtype
        self.num_blocks, groups = compat.kv_groups(model_runner)
        self.kv_bytes = compat.kv_bytes(model_runner)
        self.tracker = Tracker([size for _, size in groups])
        self.shadows: dict[int, LayerShadow] = {}
        self._results: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._chunks: list[Chunk] = []
        self._whole: list[WholePrompt] = []
        self._capturing = False
        self._calls = 0
        self._step_tokens = 0
        self._slots: dict[int, torch.Tensor] = {}
        for layer in self.geometry.values():
            self._wrap_layer(layer)
        self._wrap_step(model_runner)
        compat.keep_out_of_full_graphs(model_runner, lambda: self._capturing)

    # ------------------------------------------------------------ installing

    def shadow_heads(self, heads: Sequence[Head]) -> int:
        """Hold these heads (those of them that live here) from now on; bytes the shadow takes."""
        by_layer: dict[int, list[int]] = {}
        for layer, head in heads:
            g = self.geometry.get(layer)
            if g is not None and g.first_head <= head < g.first_head + g.num_heads:
                by_layer.setdefault(layer, []).append(head)
        self.shadows.clear()
        self.tracker.forget_recorded()
        self.shadows = {
            layer: LayerShadow(
                self.geometry[layer], chosen, self.num_blocks, self.dtype, self.device
            )
            for layer, chosen in sorted(by_layer.items())
        }
        return sum(s.nbytes for s in self.shadows.values())

    def _wrap_layer(self, geometry: LayerGeometry) -> None:
        original = geometry.impl.forward

        def forward(
            layer: Any,
            query: Any,
            key: Any,
            value: Any,
            kv_cache: Any,
            metadata: Any,
            *a: Any,
            **k: Any,
        ) -> Any:
            if self._capturing and metadata is not None:
                try:
                    self._see(geometry, query, key)
                except Exception as error:
                    self._fail_step(error)
            return original(layer, query, key, value, kv_cache, metadata, *a, **k)

        geometry.impl.forward = forward

    def _wrap_step(self, model_runner: Any) -> None:
        original = model_runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return original(scheduler_output, *args, **kwargs)
            self._begin(scheduler_output)
            try:
                result = original(scheduler_output, *args, **kwargs)
            finally:
                captured, self._capturing = self._capturing, False
            if captured:
                self._end()
            return result

        model_runner.execute_model = execute_model

    # ------------------------------------------------------------ one step

    def _begin(self, output: Any) -> None:
        try:
            self._chunks, rejected = self.tracker.step(output)
        except Exception as error:  # ordinary requests go on; every running capture is told
            logger.exception("the scheduler's output could not be followed")
            for request in self.tracker.abandon():
                self._store(request.capture_id, {"incomplete": f"{type(error).__name__}: {error}"})
            self._chunks, rejected = [], []
        for capture_id, reason in rejected:
            self._store(capture_id, {"error": reason})
        self._capturing = bool(self._chunks)
        if not self._capturing:
            return
        self._calls = 0
        self._slots.clear()
        self._step_tokens = output.total_num_scheduled_tokens
        self._whole = [WholePrompt(c) for c in self._chunks if c.request.probe.heads == "all"]
        for chunk in self._chunks:
            self._check_heads(chunk.request)

    def _check_heads(self, request: ProbedRequest) -> None:
        if request.probe.heads == "all":
            return
        for layer, head in request.probe.heads:
            g, shadow = self.geometry.get(layer), self.shadows.get(layer)
            here = g is not None and g.first_head <= head < g.first_head + g.num_heads
            if here and (shadow is None or head not in shadow.heads):
                request.fail(f"head {layer}-{head} is not held by the shadow")

    def _see(self, geometry: LayerGeometry, query: torch.Tensor, key: torch.Tensor) -> None:
        self._calls += 1
        shadow = self.shadows.get(geometry.layer)
        if shadow is None and not self._whole:
            return
        mapping = compat.slot_mapping(geometry.name)[: self._step_tokens]
        slots = self._slots.get(mapping.data_ptr())
        if slots is None:
            slots = self._slots[mapping.data_ptr()] = mapping.to(torch.int64)
        if shadow is not None:
            shadow.write(torch.where(slots < 0, shadow.trash, slots), query, key)
        for whole in self._whole:
            whole.see(geometry, slots, query, key)

    @torch.inference_mode()
    def _end(self) -> None:
        """Score the step. A fault fails the step's captures, never the ordinary requests in it."""
        try:
            self._score_step()
        except Exception as error:
            self._fail_step(error)
        for chunk in self._chunks:
            if chunk.stop == chunk.request.prompt_len:
                self._finish(chunk.request)
        self._chunks, self._whole = [], []

    def _fail_step(self, error: Exception) -> None:
        logger.exception("the captures of this step failed")
        for chunk in self._chunks:
            chunk.request.fail(f"{type(error).__name__}: {error}")

    def _score_step(self) -> None:
        if self._calls != len(self.geometry):
            for chunk in self._chunks:
                chunk.request.fail(
                    f"{self._calls} of {len(self.geometry)} attention layers were seen in this step"
                )
        for whole in self._whole:
            whole.finish()
        first = {id(c.request): c.start == c.request.own_start for c in self._chunks}
        groups = {s.geometry.group: s.geometry.block_size for s in self.shadows.values()}
        for chunk in self._chunks:  # all of them first: a request may use a prefix of this step
            if chunk.request.failure is None:
                self.tracker.record(chunk, groups)
        segments: list[Segment] = []
        for chunk in self._chunks:
            if chunk.request.failure is None and chunk.request.probe.heads != "all":
                segments.extend(self._segments(chunk, first[id(chunk.request)]))
        if segments and self.shadows:
            self._score(segments)

    def _segments(self, chunk: Chunk, first: bool) -> list[Segment]:
        """The query rows this step can score: its own, and at first those of a cached prefix."""
        request = chunk.request
        q0, q1 = request.probe.query_span
        spans = [(max(q0, chunk.start), min(q1, chunk.stop))]
        if first:
            spans.append((q0, min(q1, chunk.start)))
        found = []
        for start, stop in spans:
            if start >= stop:
                continue
            missing = self._missing(request, start)
            if any(missing):
                request.stale = missing.stale > 0
                request.fail(
                    f"of the cached blocks its query rows see, {missing.stale} were computed "
                    f"without a capture and {missing.dropped} were dropped from the cache hit"
                )
                return []
            request.rows_done += stop - start
            found.append(Segment(start, stop, request.blocks, request.columns, request))
        return found

    def _missing(self, request: ProbedRequest, row: int) -> Missing:
        kinds = {
            (s.geometry.group, s.geometry.block_size, s.geometry.window)
            for s in self.shadows.values()
        }
        found = [
            self.tracker.missing(request, max(0, row - window + 1) if window else 0, group, size)
            for group, size, window in kinds
        ]
        return Missing(sum(m.stale for m in found), sum(m.dropped for m in found))

    def _score(self, segments: list[Segment]) -> None:
        widest = max(len(s.heads) for s in self.shadows.values())
        head_dim = max(s.geometry.head_dim for s in self.shadows.values())
        budget = BUCKET_BUDGET.get(self.device.type, BUCKET_BUDGET["cpu"])
        for bucket in buckets(segments, widest, head_dim, budget):
            indices: dict[tuple[int, int | None], Any] = {}
            parts = []
            for shadow in self.shadows.values():
                g = shadow.geometry
                kind = (g.group, g.window)
                if kind not in indices:
                    indices[kind] = page_index(
                        bucket, g.group, g.block_size, g.window, shadow.trash, self.device
                    )
                parts.append(shadow.row_sums(indices[kind]))
            sums = torch.cat(parts, dim=1)
            host = _to_host(sums)
            for i, segment in enumerate(bucket):
                owner = segment.owner
                assert isinstance(owner, ProbedRequest)
                owner.parts.append((host, i))

    # ------------------------------------------------------------ results

    def _finish(self, request: ProbedRequest) -> None:
        self.tracker.finish(request)
        q0, q1 = request.probe.query_span
        if request.failure is None and request.rows_done != q1 - q0:
            request.fail(f"{request.rows_done} of {q1 - q0} query rows were scored")
        if request.failure is not None:
            self._store(request.capture_id, {"incomplete": request.failure, "stale": request.stale})
            return
        self._store(
            request.capture_id,
            {
                "probe": request.probe,
                "rows": request.rows_done,
                "columns": len(request.columns),
                "parts": request.parts,
                "held": [Head(n, h) for n, s in self.shadows.items() for h in s.heads],
            },
        )

    def _store(self, capture_id: str, result: dict[str, Any]) -> None:
        self._results[capture_id] = result
        while len(self._results) > MAX_RESULTS:
            self._results.popitem(last=False)

    def take(self, capture_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Results in the order asked for, as plain values; each is handed out once.

        ``{"heads": [[layer, head], ...], "values": float32 bytes [heads, columns]}``; or
        ``{"incomplete": reason, "stale": bool}``, worth another try; or ``{"error": reason}``,
        not worth one; or ``{}`` for an unknown id.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [self._plain(self._results.pop(i, None)) for i in capture_ids]

    def _plain(self, result: dict[str, Any] | None) -> dict[str, Any]:
        if result is None or "probe" not in result:
            return result or {}
        probe = result["probe"]
        if probe.heads == "all":
            heads, sums = WholePrompt.merge(result["parts"])
        else:
            wanted = set(probe.heads)
            rows = [i for i, head in enumerate(result["held"]) if head in wanted]
            heads = [result["held"][i] for i in rows]
            sums = np.zeros((len(rows), result["columns"]), np.float32)
            for host, i in result["parts"]:
                sums += host[i].numpy()[rows, : result["columns"]]
        values = reduce_columns(sums / result["rows"], probe)
        return {"heads": [list(h) for h in heads], "values": values.tobytes()}

    def discard(self, capture_ids: Sequence[str]) -> None:
        """Drop results nobody will take."""
        for capture_id in capture_ids:
            self._results.pop(capture_id, None)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
