"""Systems to be compared: rerankers by attention, generation and cross-encoder, and fusions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from core_rerank.errors import HeadSetError, ModelError
from core_rerank.fusion import Fusion
from core_rerank.heads import HeadSet, Window
from core_rerank.models import ResolvedModel, resolve_model
from core_rerank.prompt import DEFAULT_MAX_TOKENS_PER_DOC, PromptBuilder
from core_rerank.reranker import DEFAULT_MODEL
from core_rerank.settings import (
    check_strategy,
    choose_calibration,
    choose_head_set,
    choose_window,
)
from hook_runtime.backend import CaptureBackend
from hook_runtime.specs import Head

from .engines import EngineNeed, Engines
from .files import digest
from .rivals import CoreRanker, ListwiseRanker, Ranker, SentenceTransformersRanker
from .rivals.listwise import STEP, WINDOW, question

DEFAULT_CROSS_ENCODER = "cross-encoder/ms-marco-MiniLM-L6-v2"


@dataclass(frozen=True, slots=True)
class Started:
    """A system that is ready: its ranker, and what was found out when it started, as JSON."""

    ranker: Ranker
    facts: dict[str, Any]


@runtime_checkable
class System(Protocol):
    """Something that reranks.

    Attributes:
        name: what reports and files call it.
        pointwise: a document's score does not depend on the other candidates.
    """

    @property
    def name(self) -> str: ...

    @property
    def pointwise(self) -> bool: ...

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that decides its rankings, as JSON, known before anything is loaded."""
        ...

    @property
    def need(self) -> EngineNeed | None:
        """The engine it runs on; None where it brings its own model."""
        ...

    def start(self, backend: CaptureBackend | None) -> Started:
        """Make it ready, on the engine it needs."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionSystem:
    """A `core_rerank.Reranker`; made by ``attention_system``, which fills in what is left out.

    Attributes:
        head_set: None reads every head.
        calibrate: None does what the head set says, and calibrates where every head is read.
        engine: the engine's own arguments, such as ``dtype``.
        further: other arguments of `Reranker`, by name.
    """

    name: str
    model: ResolvedModel
    strategy: str
    window: Window
    head_set: HeadSet | None
    backend: str = "vllm"
    calibrate: bool | None = None
    max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC
    engine: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pointwise(self) -> bool:
        return self.window == 1

    @property
    def calibrated(self) -> bool:
        return choose_calibration(self.calibrate, self.head_set)

    @property
    def settings(self) -> dict[str, Any]:
        heads = self.head_set
        named = [str(head) for head in heads.heads] if heads else None
        weights = list(heads.weights) if heads and heads.weights else None
        return {
            "kind": "attention",
            "model": model_identity(self.model),
            "strategy": self.strategy,
            "window": self.window,
            "heads": named or "all",
            "head_weights": weights,
            "heads_hash": digest([named, weights]) if heads else None,
            "heads_method": heads.method if heads else None,
            "calibrate": self.calibrated,
            "max_tokens_per_doc": self.max_tokens_per_doc,
            "further": dict(self.further),
            "backend": self.backend,
            "engine": dict(self.engine),
        }

    @property
    def need(self) -> EngineNeed:
        heads = self.head_set.heads if self.head_set else None
        return EngineNeed(self.model, self.backend, heads, self.engine)

    def start(self, backend: CaptureBackend | None) -> Started:
        backend = _engine(self.name, backend)
        ranker = CoreRanker(
            backend,
            heads=self.head_set,
            strategy=self.strategy,
            window=self.window,
            calibrate=self.calibrated,
            max_tokens_per_doc=self.max_tokens_per_doc,
            **self.further,
        )
        builder = PromptBuilder(
            backend.tokenizer, backend.model.max_model_len, self.max_tokens_per_doc
        )
        prompt = builder.build("query", ["document"]).token_ids
        return Started(ranker, {**engine_facts(backend), "prompt_hash": digest([prompt])})


@dataclass(frozen=True, slots=True)
class GenerationSystem:
    """RankGPT-style listwise generation by the same model on vLLM (see `ListwiseRanker`)."""

    name: str
    model: ResolvedModel
    engine: Mapping[str, Any] = field(default_factory=dict)
    window: int = WINDOW
    step: int = STEP

    @property
    def pointwise(self) -> bool:
        return False

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "kind": "generation",
            "model": model_identity(self.model),
            "window": self.window,
            "step": self.step,
            "backend": "vllm",
            "engine": dict(self.engine),
        }

    @property
    def need(self) -> EngineNeed:
        return EngineNeed(self.model, "vllm", None, self.engine)

    def start(self, backend: CaptureBackend | None) -> Started:
        backend = _engine(self.name, backend)
        limit = backend.model.max_model_len
        ranker = ListwiseRanker(backend, backend.tokenizer, limit, self.window, self.step)
        prompt = digest(question("query", ["document"]))
        return Started(ranker, {**engine_facts(backend), "prompt_hash": prompt})


@dataclass(frozen=True, slots=True)
class CrossEncoderSystem:
    """A sentence-transformers cross-encoder; ``options`` are the CrossEncoder's own."""

    name: str
    model: str = DEFAULT_CROSS_ENCODER
    batch_size: int = 32
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pointwise(self) -> bool:
        return True

    @property
    def settings(self) -> dict[str, Any]:
        folder = Path(self.model)
        return {
            "kind": "cross-encoder",
            "model": {"id": self.model, "files": _files(folder) if folder.is_dir() else None},
            "batch_size": self.batch_size,
            "options": dict(self.options),
        }

    @property
    def need(self) -> None:
        return None

    def start(self, backend: CaptureBackend | None) -> Started:
        try:
            ranker = SentenceTransformersRanker(self.model, self.batch_size, **self.options)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"the cross-encoder {self.model} could not be loaded ({error!s:.300}). Give a "
                "local folder or a Hugging Face id that can be fetched from here: "
                "cross-encoder:FOLDER."
            ) from None
        return Started(ranker, {"prompt_hash": None})


@dataclass(frozen=True, slots=True)
class RankerSystem:
    """Any other `Ranker`; ``about`` says, as JSON, what decides its rankings."""

    name: str
    make: Callable[[], Ranker]
    about: Mapping[str, Any] = field(default_factory=dict)
    pointwise: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"kind": "ranker", **self.about}

    @property
    def need(self) -> None:
        return None

    def start(self, backend: CaptureBackend | None) -> Started:
        return Started(self.make(), {})


@dataclass(frozen=True, slots=True)
class FusedSystem:
    """The ranking of the system called ``of``, fused with the first stage's; costs no model."""

    name: str
    of: str
    fusion: Fusion

    @property
    def settings(self) -> dict[str, Any]:
        fusion = self.fusion
        chosen = {"method": "rrf", "k": fusion.k}
        if fusion.weight is not None:
            chosen = {
                "method": "weight",
                "weight": fusion.weight,
                "normalisation": fusion.normalisation,
            }
        return {"kind": "fusion", "of": self.of, **chosen}


def attention_system(
    model: str = DEFAULT_MODEL,
    *,
    name: str | None = None,
    strategy: str = "core",
    window: Window | None = None,
    heads: HeadSet | None = None,
    config: Path | None = None,
    backend: str = "vllm",
    calibrate: bool | None = None,
    max_tokens_per_doc: int = DEFAULT_MAX_TOKENS_PER_DOC,
    **engine: Any,
) -> AttentionSystem:
    """A reranker with `Reranker`'s arguments and defaults; loads nothing, but fetches an alias.

    Raises:
        ModelError, HeadSetError, ValueError: as `Reranker` does.
    """
    resolved, chosen = resolve_model(model), check_strategy(strategy)
    found = choose_head_set(heads, config, chosen, resolved.model_id)
    return AttentionSystem(
        name or strategy,
        resolved,
        strategy,
        choose_window(window, found),
        None if chosen.heads == "all" else found,
        backend,
        calibrate,
        max_tokens_per_doc,
        engine,
    )


def with_strategy(base: AttentionSystem, strategy: str, window: Window, name: str) -> System:
    """``base`` with another strategy and window; its heads where the strategy reads some."""
    chosen = check_strategy(strategy)
    head_set = base.head_set
    if chosen.heads == "all":
        head_set = None
    elif head_set is None:
        head_set = choose_head_set(None, None, chosen, base.model.model_id)
    return replace(base, name=name, strategy=strategy, window=window, head_set=head_set)


def with_random_heads(base: AttentionSystem, seed: int) -> System:
    """``base`` with as many heads drawn from all heads of the model: what choosing must beat."""
    heads = base.head_set
    if heads is None:
        raise HeadSetError(
            f"random heads stand beside a head set, but {base.name} reads every head of "
            f"{base.model.model_id}: use --strategy core or qr, or leave random-heads out."
        )
    every = [Head(i, j) for i in range(heads.num_layers) for j in range(heads.num_heads)]
    drawn = tuple(random.Random(seed).sample(every, len(heads.heads)))
    # A plain sum needs the null pass, also where the weights that it goes without did not.
    control = replace(
        heads,
        heads=drawn,
        method=f"random, seed {seed}",
        scores=None,
        weights=None,
        calibrate=heads.calibrate or heads.weights is not None,
        default=False,
    )
    return replace(base, name=f"random-heads:{seed}", head_set=control)


def by_engine(systems: Iterable[System]) -> list[list[System]]:
    """The systems in groups that one engine serves, in order of the first of each."""
    groups: dict[object, list[System]] = {}
    for system in systems:
        groups.setdefault(system.need and system.need.key, []).append(system)
    return list(groups.values())


def engines_for(systems: Iterable[System]) -> Engines:
    """Engines with room for what all of the systems read."""
    return Engines(system.need for system in systems if system.need is not None)


def model_identity(model: ResolvedModel) -> dict[str, Any]:
    """Which weights: id and revision, or a hash of a folder's configuration and file sizes."""
    folder = Path(model.path_or_id)
    known = model.revision is not None or not folder.is_dir()
    return {
        "id": model.model_id,
        "revision": model.revision,
        "files": None if known else _files(folder),
    }


def engine_facts(backend: CaptureBackend) -> dict[str, Any]:
    """What an engine turned out to be, as far as it bears on the numbers."""
    info = backend.model
    return {
        "revision": info.revision,
        "dtype": info.dtype,
        "device": info.device,
        "max_model_len": info.max_model_len,
        "layers_kept": info.layers_kept,
    }


def _files(folder: Path) -> str:
    """A hash of a model folder's configuration, and of the names and sizes of its files."""
    config = folder / "config.json"
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return digest([sizes, config.read_text(encoding="utf-8") if config.is_file() else ""])


def _engine(name: str, backend: CaptureBackend | None) -> CaptureBackend:
    if backend is None:
        raise ValueError(f"{name} runs on an engine: give the one that it needs.")
    return backend
