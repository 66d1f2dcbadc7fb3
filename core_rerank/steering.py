"""SteeringVector: what an instruction does to the residual stream, to be done without it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hook_runtime.positions import Positions

if TYPE_CHECKING:
    from hook_runtime.engine import HookLLM
    from hook_runtime.programs import Program
    from hook_runtime.specs import ModelInfo

BATCH = 64  # prompts whose states are brought back at once
FOLDS = 5
_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """The difference of means of the residual stream over pairs of prompts, layer by layer.

    After A. Stolfo and others, *Improving Instruction-Following in Language Models through
    Activation Steering*, arXiv 2410.12877: one prompt of a pair has the instruction, the other
    lacks it.

    Attributes:
        model, revision: whose layers these are.
        layers: decoder layers, from zero, in order; what layer i gives out is transformers'
            ``hidden_states[i + 1]``.
        directions: float32 [layers, hidden], mean with the instruction less mean without it.
        targets: float32 [layers], the mean projection of the states with the instruction on the
            layer's direction made one long.
        separation: float32 [layers], how far apart the pairs' two sides lie along the direction
            of other pairs (``FOLDS`` folds): difference of means over their standard deviation.
        pairs: how many pairs were read.
        layer: the one that is steered; see ``at``.
    """

    model: str
    revision: str | None
    layers: tuple[int, ...]
    directions: np.ndarray
    targets: np.ndarray
    separation: np.ndarray
    pairs: int
    layer: int

    def __post_init__(self) -> None:
        self._row(self.layer)

    @classmethod
    def fit(
        cls,
        llm: HookLLM,
        positive: Sequence[Any],
        negative: Sequence[Any],
        *,
        layers: Sequence[int] | Literal["all"] = "all",
        positions: Positions = "last",
        progress: bool = False,
    ) -> SteeringVector:
        """Read both sides of every pair, and take the difference of their means.

        ``layer`` becomes the one with the largest ``separation``, which costs no generation; the
        layer that steers best is found by trying (`at`).

        Args:
            llm: an engine that reads hidden states: ``HookLLM(..., programs=True)`` or eager.
            positive: prompts with the instruction: text, token ids or conversations (lists of
                messages, as ``llm.chat`` takes them).
            negative: the same prompts without it, in the same order.
            layers: decoder layers to read. The last one has no state of its own in transformers'
                numbering (the final norm follows it) and cannot be read.
            positions: tokens to read, averaged in each prompt: ``"last"``, ``"prompt"`` or a span.
            progress: show a progress bar.

        Raises:
            ValueError: fewer than two pairs, sides of different length, or a layer that is not
                there.
            ProbeError: a prompt cannot be computed, or there would be too much to read.
            UnsupportedVLLMError: the engine keeps its hidden states closed.
        """
        _check_sides(positive, negative)
        chosen = check_layers(layers, llm.model)
        states = _read(llm, [*positive, *negative], chosen, positions, progress)
        found = _measure(states[: len(positive)], states[len(positive) :])
        best = chosen[int(found.separation.argmax())]
        model = llm.model
        return cls(model.name, model.revision, chosen, *found.values(), len(positive), best)

    def at(self, layer: int) -> SteeringVector:
        """The same, steering at this layer; ValueError for one that was not read."""
        return replace(self, layer=layer)

    @property
    def direction(self) -> np.ndarray:
        """float32 [hidden]: that of ``layer``."""
        return self.directions[self._row(self.layer)]

    def scaled(self, coefficient: float, *, positions: Positions = "all") -> Program:
        """``coefficient`` times the direction, added to the stream: for ``generate(steer=...)``.

        1 moves the stream as far as the instruction moved it on average.
        """
        from hook_runtime.interventions import AddVector
        from hook_runtime.programs import Program
        from hook_runtime.vectors import Vector

        added = AddVector((self.layer,), Vector(self.direction), coefficient, positions=positions)
        return Program((), (added,))

    def projected(self, *, positions: Positions = "all") -> Program:
        """The stream's projection on the direction brought to that seen with the instruction.

        The coefficient of arXiv 2410.12877: it differs from token to token.
        """
        from hook_runtime.interventions import ProjectTo
        from hook_runtime.programs import Program
        from hook_runtime.vectors import Vector

        target = float(self.targets[self._row(self.layer)])
        brought = ProjectTo((self.layer,), Vector(self.direction), target, positions=positions)
        return Program((), (brought,))

    def save(
        self,
        folder: str | os.PathLike[str],
        coefficient: float | None = 1.0,
        *,
        positions: Positions = "all",
    ) -> Path:
        """Write ``steering.safetensors``, and ``program.yaml`` that an engine loads as it is.

        ``HookLLM(config="FOLDER/program.yaml")`` then steers at ``layer`` with this coefficient;
        None projects. Each file appears whole or not at all. Returns the config's path.

        Raises:
            ValueError: a coefficient that is not finite, which no engine would load.
        """
        from .steering_files import write_folder

        return write_folder(self, Path(folder), coefficient, positions)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> SteeringVector:
        """Inverse of ``save``; DataError where the folder holds no steering vector."""
        from .steering_files import read_folder

        return cls(**read_folder(Path(folder)))

    def _row(self, layer: int) -> int:
        if layer not in self.layers:
            raise ValueError(
                f"layer {layer} was not read: this vector has {', '.join(map(str, self.layers))}."
            )
        return self.layers.index(layer)


def check_instruction(instruction: str) -> None:
    """ValueError for one without words: both sides of a pair would be the same."""
    if not instruction.strip():
        raise ValueError("the instruction is empty: give the words that ask for the behaviour.")


def instruction_pairs(
    prompts: Sequence[str], instruction: str
) -> tuple[list[list[dict[str, str]]], list[list[dict[str, str]]]]:
    """Conversations of one question each, with the instruction after it and without it.

    Raises:
        ValueError: the instruction is empty.
    """
    check_instruction(instruction)
    positive = [[{"role": "user", "content": f"{prompt} {instruction}"}] for prompt in prompts]
    negative = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return positive, negative


@dataclass(frozen=True, slots=True)
class _Measured:
    directions: np.ndarray
    targets: np.ndarray
    separation: np.ndarray

    def values(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.directions, self.targets, self.separation


def _measure(positive: np.ndarray, negative: np.ndarray) -> _Measured:
    """Of both sides' states, float64 [pairs, layers, hidden]."""
    directions = (positive - negative).mean(axis=0)
    targets = np.einsum("plh,lh->pl", positive, _units(directions)).mean(axis=0)
    separation = _separation(positive, negative)
    kind = np.float32
    return _Measured(directions.astype(kind), targets.astype(kind), separation.astype(kind))


def _separation(positive: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """[layers]: each pair is judged along the direction of the pairs in other folds."""
    count, layers, _ = positive.shape
    fold_of = np.arange(count) % min(FOLDS, count)
    along = np.empty((2, count, layers))
    for fold in np.unique(fold_of):
        held = fold_of == fold
        units = _units((positive[~held] - negative[~held]).mean(axis=0))
        for side, states in enumerate((positive, negative)):
            along[side, held] = np.einsum("plh,lh->pl", states[held], units)
    spread = np.sqrt(along.var(axis=1).mean(axis=0))
    return (along[0].mean(axis=0) - along[1].mean(axis=0)) / np.maximum(spread, _TINY)


def _units(directions: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(directions, axis=-1, keepdims=True)
    return directions / np.maximum(lengths, _TINY)


def _check_sides(positive: Sequence[Any], negative: Sequence[Any]) -> None:
    for name, side in (("positive", positive), ("negative", negative)):
        if isinstance(side, str) or not isinstance(side, Sequence):
            raise ValueError(f"{name} must be a list of prompts, not {side!r:.80}.")
    if len(positive) != len(negative):
        raise ValueError(
            f"{len(positive)} positive but {len(negative)} negative prompts: they come in pairs."
        )
    if len(positive) < 2:
        raise ValueError(f"{len(positive)} pairs are too few: give two at least, better 40.")


def check_layers(layers: Any, model: ModelInfo) -> tuple[int, ...]:
    """Layers in order; ValueError for one that cannot be read."""
    count = model.layers_kept - 1
    if layers == "all":
        return tuple(range(count))
    from hook_runtime.specs import parse_layers

    parsed = parse_layers(layers)
    assert not isinstance(parsed, str)
    beyond = [layer for layer in parsed if layer >= count]
    if beyond:
        raise ValueError(f"layer {beyond[0]} cannot be read: there are 0 to {count - 1}.")
    return tuple(sorted(parsed))


def _read(
    llm: HookLLM,
    prompts: list[Any],
    layers: tuple[int, ...],
    positions: Positions,
    progress: bool,
) -> np.ndarray:
    """What the layers give out, averaged over the positions: float64 [prompts, layers, hidden]."""
    from tqdm import tqdm

    from hook_runtime.exchange import one_token
    from hook_runtime.probes import HiddenStateProbe
    from hook_runtime.program_work import chat_prompt
    from hook_runtime.programs import Program

    probe = HiddenStateProbe(
        tuple(layer + 1 for layer in layers), positions=positions, reduce="mean"
    )
    program, tokenizer = Program((probe,)), llm.tokenizer
    sent = [chat_prompt(p, tokenizer, {}) if _is_conversation(p) else p for p in prompts]
    found = []
    with tqdm(total=len(sent), desc="reading", unit="prompt", disable=not progress) as bar:
        for start in range(0, len(sent), BATCH):
            part = sent[start : start + BATCH]
            for i, done in enumerate(llm.perform(part, program, one_token())):
                values = done.reading.states[0].values
                if values.shape[1] != 1:
                    raise ValueError(
                        f"prompt {start + i} has no tokens at positions {positions!r}."
                    )
                found.append(values[:, 0].astype(np.float64))
            bar.update(len(part))
    return np.stack(found)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
