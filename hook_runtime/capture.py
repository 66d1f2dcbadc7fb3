"""The worker's capture: wraps the step and, while it captures, the attention layers; scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import compat
from .geometry import LayerGeometry, read_geometry
from .memory import free_bytes, heads_by_layer
from .results import Results
from .shadow import LayerShadow, Segment
from .specs import Head
from .torch_scorer import TorchScorer
from .tracker import Chunk, Missing, ProbedRequest, Tracker
from .whole import WholePrompt

logger = logging.getLogger(__name__)

Scorer = Callable[[Sequence[Segment]], Iterator[tuple[list[Segment], torch.Tensor]]]
REGROWN = "the heads that the workers hold were changed meanwhile, for another caller"


class CaptureState:
    """One per worker. Lives on the model runner's ``execute_model`` and the layers' ``forward``."""

    def __init__(self, vllm_config: Any, model_runner: Any, device: torch.device) -> None:
        self.device = device
        self.geometry = read_geometry(vllm_config, model_runner)
        self.dtype = vllm_config.model_config.dtype
        self.num_blocks, groups = compat.kv_groups(model_runner)
        self.kv_bytes = compat.kv_bytes(model_runner, vllm_config)
        self.tracker = Tracker([size for _, size in groups])
        self.shadows: dict[int, LayerShadow] = {}
        self.results = Results()
        self._score: Scorer | None = None
        self._chunks: list[Chunk] = []
        self._whole: list[WholePrompt] = []
        self._capturing = False
        self._calls = 0
        self._step_tokens = 0
        self._output: Any = None
        self._error: Exception | None = None
        self._slots: dict[int, torch.Tensor] = {}
        self._wrap_step(model_runner)
        compat.keep_out_of_full_graphs(model_runner, lambda: self._capturing)

    # ------------------------------------------------------------ the heads held

    def room(self, heads: Sequence[Head]) -> tuple[int, int]:
        """Bytes that a shadow of these heads takes here; bytes free for it, the old one's too."""
        needed = sum(
            LayerShadow.size(self.geometry[layer], chosen, self.num_blocks, self.dtype)
            for layer, chosen in self._heads_here(heads).items()
        )
        held = sum(s.nbytes for s in self.shadows.values())
        return needed, free_bytes(self.device) + held

    def shadow_heads(self, heads: Sequence[Head]) -> int:
        """Hold these heads (those of them that live here) from now on; bytes the shadow takes."""
        self._score = None
        self.shadows.clear()
        self.tracker.forget_recorded(REGROWN)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the new shadow's sizes differ from the old one's
        self.shadows = {
            layer: LayerShadow(
                self.geometry[layer], chosen, self.num_blocks, self.dtype, self.device
            )
            for layer, chosen in self._heads_here(heads).items()
        }
        if self.shadows:
            self._score = make_scorer(list(self.shadows.values()), self.device)
        return sum(s.nbytes for s in self.shadows.values())

    def _heads_here(self, heads: Sequence[Head]) -> dict[int, list[int]]:
        return heads_by_layer(h for h in heads if self._is_here(h))

    def _is_here(self, head: Head) -> bool:
        """Whether the head lives on this worker."""
        return head.layer in self.geometry and self.geometry[head.layer].has(head.head)

    # ------------------------------------------------------------ wrapping

    def _wrap_step(self, model_runner: Any) -> None:
        original = model_runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return original(scheduler_output, *args, **kwargs)
            self._begin(scheduler_output)
            if not self._capturing:
                return original(scheduler_output, *args, **kwargs)
            unwrap = [self._wrap_layer(g) for g in self.geometry.values()]
            try:
                result = original(scheduler_output, *args, **kwargs)
            finally:
                self._capturing = False
                for undo in unwrap:
                    undo()
            self._end()
            return result

        model_runner.execute_model = execute_model

    def _wrap_layer(self, geometry: LayerGeometry) -> Callable[[], None]:
        """See one layer's q and k until the returned function is called.

        Layers are wrapped for the steps that capture only, so other steps pay nothing.
        """
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
            if metadata is not None:
                try:
                    self._see(geometry, query, key)
                except Exception as error:
                    self._error = error  # one reason for all layers of the step
            if geometry.unread and "output" in k:
                return k["output"].zero_()
            return original(layer, query, key, value, kv_cache, metadata, *a, **k)

        return geometry.stand_in(forward)

    # ------------------------------------------------------------ one step

    def _begin(self, output: Any) -> None:
        """Before the forward: only what it needs, since the GPU waits for it."""
        self._output, self._error = output, None
        self._chunks, self._whole = [], []
        concern = self.tracker.concerns(output)
        self._capturing = concern.captures
        if concern.whole or not concern.captures:
            self._follow()
        if concern.captures:
            self._calls = 0
            self._slots.clear()
            self._step_tokens = output.total_num_scheduled_tokens
            self._whole = [WholePrompt(c) for c in self._chunks if c.request.probe.heads == "all"]

    def _follow(self) -> None:
        output, self._output = self._output, None
        if output is None:
            return
        try:
            self._chunks, rejected = self.tracker.step(output)
        except Exception as error:  # ordinary requests go on; every running capture is told
            logger.exception("the scheduler's output could not be followed")
            for request in self.tracker.abandon():
                self.results.fail(request.capture_id, f"{type(error).__name__}: {error}")
            self._chunks, rejected = [], []
        for capture_id, reason in rejected:
            self.results.reject(capture_id, reason)
        for chunk in self._chunks:
            self._check_heads(chunk.request)

    def _check_heads(self, request: ProbedRequest) -> None:
        if request.probe.heads == "all":
            return
        for head in request.probe.heads:
            shadow = self.shadows.get(head.layer)
            if self._is_here(head) and (shadow is None or head.head not in shadow.heads):
                held = " ".join(str(Head(n, h)) for n, s in self.shadows.items() for h in s.heads)
                request.fail(f"head {head} is not among those held here ({held or 'none'})")

    def _see(self, geometry: LayerGeometry, query: torch.Tensor, key: torch.Tensor) -> None:
        self._calls += 1
        shadow = self.shadows.get(geometry.layer)
        if shadow is None and not self._whole:
            return
        mapping = compat.slot_mapping(geometry.name)[: self._step_tokens]
        if shadow is not None:
            slots = self._slots.get(mapping.data_ptr())
            if slots is None:
                slots = torch.where(mapping < 0, shadow.trash, mapping.to(torch.int64))
                self._slots[mapping.data_ptr()] = slots
            shadow.write(slots, query, key)
        for whole in self._whole:
            whole.see(geometry, mapping, query, key)

    @torch.inference_mode()
    def _end(self) -> None:
        """Score the step. A fault fails the step's captures, never the ordinary requests in it."""
        self._follow()
        try:
            if self._error is not None:
                raise self._error
            self._score_step()
        except Exception as error:
            logger.exception("the captures of this step failed")
            for chunk in self._chunks:
                chunk.request.fail(f"{type(error).__name__}: {error}")
        for chunk in self._chunks:
            if chunk.stop == chunk.request.prompt_len:
                self._finish(chunk.request)
        self._chunks, self._whole = [], []
        self.results.settle()

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
        if segments and self._score is not None:
            held = self._held()
            for bucket, sums in self._score(segments):
                owners = [s.owner for s in bucket if isinstance(s.owner, ProbedRequest)]
                assert len(owners) == len(bucket)
                part = self.results.fetch_sums(sums, owners, held)
                for i, owner in enumerate(owners):
                    owner.parts.append((part, i))

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
            found.append(Segment(start, stop, request.blocks, request))
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

    def _finish(self, request: ProbedRequest) -> None:
        self.tracker.finish(request)
        q0, q1 = request.probe.query_span
        if request.failure is None and request.rows_done != q1 - q0:
            request.fail(f"{request.rows_done} of {q1 - q0} query rows were scored")
        self.results.finish(request, self._held())

    def _held(self) -> list[Head]:
        """The heads along the second axis of the sums."""
        return [Head(n, h) for n, s in self.shadows.items() for h in s.heads]

    # ------------------------------------------------------------ looking in

    def stats(self) -> dict[str, int]:
        """Requests followed, results kept, blocks recorded, layers wrapped, bytes of the shadow."""
        wrapped = sum("forward" in vars(g.impl) for g in self.geometry.values())
        return {
            "requests": len(self.tracker),
            "results": len(self.results),
            "recorded_blocks": self.tracker.recorded,
            "wrapped_layers": wrapped,
            "shadow_bytes": sum(s.nbytes for s in self.shadows.values()),
        }


def make_scorer(shadows: Sequence[LayerShadow], device: torch.device) -> Scorer:
    """The fastest scorer that the device and the shadows allow."""
    if device.type == "cuda":
        from .triton_scorer import TritonScorer

        if TritonScorer.suits(shadows, device):
            scorer = TritonScorer(shadows, device)
            scorer.warm_up()
            return scorer
    return TorchScorer(shadows, device)
