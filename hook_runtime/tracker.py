"""Follows vLLM's scheduler: which prompt tokens each probed request computes in a step, and which
cache blocks hold tokens whose queries and keys the shadow has seen.

Only ``SchedulerOutput`` is read, never the batch, so every model runner looks the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .compat import NULL_BLOCK, extra_arg
from .errors import ProbeError
from .specs import AttentionProbe

EXTRA_ARG = "hook_runtime"


@dataclass(slots=True, eq=False)
class ProbedRequest:
    """A running request that carries a probe.

    ``own_start..own_end`` are the prompt tokens it has computed itself; what lies before came from
    the prefix cache. ``failure`` is set, once, when the capture cannot be completed, and
    ``stale`` when that is because the prefix cache holds blocks that nobody captured.
    """

    request_id: str
    capture_id: str
    probe: AttentionProbe
    tokens: np.ndarray
    blocks: list[list[int]]
    own_start: int
    own_end: int
    seed: bytes
    rows_done: int = 0
    failure: str | None = None
    stale: bool = False
    parts: list[Any] = field(default_factory=list)
    columns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    _hashes: dict[int, list[bytes]] = field(default_factory=dict)

    @property
    def prompt_len(self) -> int:
        return len(self.tokens)

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            self.parts.clear()

    def restart(self, blocks: list[list[int]], computed: int) -> None:
        """Preempted and resumed: what was captured is computed again."""
        self.blocks = blocks
        self.own_start = self.own_end = computed
        self.rows_done = 0
        self.failure = None
        self.stale = False
        self.parts.clear()

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Chain hash of every full block: equal hashes mean an equal prefix up to that block."""
        hashes = self._hashes.get(block_size)
        if hashes is None:
            hashes, previous, data = [], self.seed, self.tokens.tobytes()
            width = self.tokens.itemsize * block_size
            for i in range(self.prompt_len // block_size):
                block = data[i * width : (i + 1) * width]
                previous = hashlib.blake2b(previous + block, digest_size=16).digest()
                hashes.append(previous)
            self._hashes[block_size] = hashes
        return hashes


class Chunk(NamedTuple):
    """Prompt tokens ``start..stop`` of a request, computed in this step."""

    request: ProbedRequest
    start: int
    stop: int


class Missing(NamedTuple):
    """Cached blocks whose keys are not at hand.

    ``stale`` ones were computed without a capture; ``dropped`` ones were left out of a
    sliding-window group's prefix hit, because only rows before the hit's end would read them.
    """

    stale: int
    dropped: int


class Rejected(NamedTuple):
    """A request whose probe cannot be read: it runs as an ordinary one."""

    capture_id: str
    reason: str


class Concern(NamedTuple):
    """Whether a step computes prompts with a probe; and of all heads, read as they pass."""

    captures: bool
    whole: bool


def columns_of(probe: AttentionProbe) -> np.ndarray:
    """Prompt positions of every token in the probe's spans; int64 [tokens]."""
    return np.concatenate([np.arange(a, b, dtype=np.int64) for a, b in probe.spans])


def _carried(new_request: Any) -> dict[str, Any] | None:
    return extra_arg(new_request, EXTRA_ARG)


def _read(new_request: Any, carried: dict[str, Any]) -> ProbedRequest:
    if new_request.prompt_token_ids is None or getattr(new_request, "mm_features", None):
        raise ProbeError("only text prompts (token ids) can be probed, not embeddings or images.")
    try:
        probe = AttentionProbe.from_json(json.loads(carried.get("probe", "{}")))
    except (TypeError, json.JSONDecodeError) as error:
        raise ProbeError(f"the request's probe is no JSON: {error}.") from error
    probe.check_prompt(len(new_request.prompt_token_ids))
    lora = new_request.lora_request
    computed = min(new_request.num_computed_tokens, len(new_request.prompt_token_ids))
    return ProbedRequest(
        request_id=new_request.req_id,
        capture_id=str(carried.get("id")),
        probe=probe,
        tokens=np.asarray(new_request.prompt_token_ids, dtype=np.int32),
        blocks=[list(b) for b in new_request.block_ids],
        own_start=computed,
        own_end=computed,
        seed=str(lora.lora_int_id if lora else 0).encode(),
        columns=columns_of(probe),
    )


class Tracker:
    """The state that outlives a step: probed requests, and the recorded blocks by content."""

    def __init__(self, block_sizes: list[int]) -> None:
        self._block_sizes = block_sizes
        self._requests: dict[str, ProbedRequest] = {}
        self._recorded: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def abandon(self) -> list[ProbedRequest]:
        """Stop following every request, and trust no block; the requests that were followed."""
        followed = list(self._requests.values())
        self._requests.clear()
        self._recorded.clear()
        return followed

    def forget_recorded(self, reason: str) -> None:
        """The shadow was emptied: no block is recorded any more; what runs has lost its keys."""
        self._recorded.clear()
        for request in self._requests.values():
            request.fail(reason)

    @property
    def recorded(self) -> int:
        """Blocks whose content the shadow holds."""
        return len(self._recorded)

    def concerns(self, output: Any) -> Concern:
        """What this step is to the runtime, without taking it in."""
        carried = [c for c in map(_carried, output.scheduled_new_reqs) if c is not None]
        running = self._requests and any(
            request_id in self._requests for request_id in output.scheduled_cached_reqs.req_ids
        )
        return Concern(bool(carried or running), any(c.get("whole") for c in carried))

    def step(self, output: Any) -> tuple[list[Chunk], list[Rejected]]:
        """Take in one ``SchedulerOutput``; the prompt chunks of probed requests in this step."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        if self._recorded:
            for block in _overwritten(output, self._block_sizes):
                self._recorded.pop(block, None)
        chunks: list[Chunk] = []
        rejected: list[Rejected] = []
        for new in output.scheduled_new_reqs:
            carried = _carried(new)
            if carried is None:
                continue
            try:
                request = _read(new, carried)
            except ProbeError as error:
                rejected.append(Rejected(str(carried.get("id")), str(error)))
                continue
            self._requests[new.req_id] = request
            chunks.append(_chunk(request, new.num_computed_tokens, output))
        if self._requests:
            chunks.extend(self._continued(output))
        return chunks, rejected

    def _continued(self, output: Any) -> Iterator[Chunk]:
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            new_blocks, computed = cached.new_block_ids[i], cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                request.restart([list(b) for b in new_blocks], min(computed, request.prompt_len))
            elif new_blocks is not None:
                for held, added in zip(request.blocks, new_blocks, strict=True):
                    held.extend(added)
            yield _chunk(request, computed, output)

    def finish(self, request: ProbedRequest) -> None:
        """The request's prompt is computed: its decode steps are nobody's business."""
        self._requests.pop(request.request_id, None)

    def record(self, chunk: Chunk, groups: dict[int, int]) -> None:
        """The shadow now holds this chunk; ``groups`` maps KV-cache group to tokens a block."""
        request = chunk.request
        if request.own_end != chunk.start:
            request.fail("the scheduler skipped tokens")
            return
        for group, size in groups.items():
            hashes = request.block_hashes(size)
            for i in range(request.own_end // size, chunk.stop // size):
                if i * size >= request.own_start:
                    self._recorded[request.blocks[group][i]] = hashes[i]
        request.own_end = chunk.stop

    def missing(self, request: ProbedRequest, low: int, group: int, size: int) -> Missing:
        """What the shadow lacks of the request's cached blocks from position ``low`` on."""
        hashes = request.block_hashes(size)
        stale = dropped = 0
        for i in range(low // size, -(-request.own_start // size)):
            block = request.blocks[group][i]
            if block == NULL_BLOCK:
                dropped += 1
            elif i >= len(hashes) or self._recorded.get(block) != hashes[i]:
                stale += 1
        return Missing(stale, dropped)


def _chunk(request: ProbedRequest, computed: int, output: Any) -> Chunk:
    stop = computed + output.num_scheduled_tokens[request.request_id]
    return Chunk(request, min(computed, request.prompt_len), min(stop, request.prompt_len))


def _overwritten(output: Any, block_sizes: list[int]) -> Iterator[int]:
    """Blocks that this step gives to new content, for any request, probed or not."""
    for new in output.scheduled_new_reqs:
        for ids, size in zip(new.block_ids, block_sizes, strict=True):
            yield from ids[new.num_computed_tokens // size :]
    cached = output.scheduled_cached_reqs
    for i, new_blocks in enumerate(cached.new_block_ids):
        if new_blocks is None:
            continue
        resumed = cached.req_ids[i] in cached.resumed_req_ids
        kept = cached.num_computed_tokens[i] if resumed else 0
        for ids, size in zip(new_blocks, block_sizes, strict=True):
            yield from ids[kept // size :]
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        yield copy[1]
