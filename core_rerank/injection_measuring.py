"""One engine pass over labelled texts: every head's attention on the instruction and the data."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hook_runtime.specs import ModelInfo

from .errors import DataError
from .files import write_whole
from .injection_data import DEFAULT_INSTRUCTION, LabelledText
from .injection_prompt import GuardedPromptBuilder, guarded_request, instruction_and_data
from .injection_scoring import focus
from .versions import package_versions

if TYPE_CHECKING:
    import numpy as np

    from hook_runtime.backend import CaptureBackend

FORMAT = "core-rerank injection attention 1"
BATCH = 64


@dataclass(frozen=True, slots=True)
class InjectionMeasurement:
    """What was measured: enough to say where heads come from.

    Attributes:
        model: the model that ran; ``name`` is its id.
        data: name of the data; ``data_hash`` of its texts, labels and instructions.
        instruction: what texts without one of their own were shown under.
        prompt_hash: of the token ids of a fixed prompt.
        versions: of the packages involved.
    """

    model: ModelInfo
    data: str
    data_hash: str
    instruction: str
    prompt_hash: str
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class InjectionAttention:
    """Every head's attention, from the last token of each text's prompt.

    Attributes:
        masses: float32 [texts, layers, heads, 2]: on the instruction and on the data.
        tokens: int32 [texts]: the data's length.
        attack: bool [texts].
        groups: one a text (see `LabelledText`).
    """

    masses: np.ndarray
    tokens: np.ndarray
    attack: np.ndarray
    groups: tuple[str, ...]
    measurement: InjectionMeasurement

    def drawn(self, max_layers: int | None = None) -> np.ndarray:
        """float64 [texts, heads of all layers]: the share drawn from the instruction, 1 - focus."""
        return 1.0 - focus(self.masses[:, :max_layers]).reshape(len(self.masses), -1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, replacing ``path`` in one step."""
        from safetensors.numpy import save

        about = {"groups": self.groups, **asdict(self.measurement)}
        arrays = {"masses": self.masses, "tokens": self.tokens, "attack": self.attack}
        metadata = {"format": FORMAT, "about": json.dumps(about)}
        write_whole(Path(path), save(arrays, metadata=metadata))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> InjectionAttention:
        """Inverse of ``save``; DataError for any other file."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                metadata = file.metadata() or {}
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise DataError(f"{path} is no safetensors file: {error}.") from None
        if metadata.get("format") != FORMAT:
            raise DataError(
                f"{path} holds no attention that `core-rerank detect-heads --task injection` "
                "measured, or another release wrote it: measure again."
            )
        about: dict[str, Any] = json.loads(metadata["about"])
        groups = tuple(about.pop("groups"))
        about["model"] = ModelInfo(**about["model"])
        return cls(**arrays, groups=groups, measurement=InjectionMeasurement(**about))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What attention must have been measured with to be taken from a store.

    Attributes:
        model: its id; ``backend`` what ran it.
        data_hash: of the texts.
        instruction: of texts without one of their own.
        layers: so many or more, counted from the first; None: all.
    """

    model: str
    backend: str
    data_hash: str
    instruction: str = ""
    layers: int | None = None


def load_measured(path: str | os.PathLike[str], wanted: Wanted) -> InjectionAttention:
    """The attention of ``path``; DataError if it was measured with anything else."""
    kept = InjectionAttention.load(path)
    about, model = kept.measurement, kept.measurement.model
    layers = min(wanted.layers or model.num_layers, model.num_layers)
    others = [
        f"{name} {there!r} instead of {asked!r}"
        for name, there, asked in (
            ("model", model.name, wanted.model),
            ("backend", model.backend, wanted.backend),
            ("instruction", about.instruction, wanted.instruction),
        )
        if there != asked
    ]
    others += ["other texts"] if about.data_hash != wanted.data_hash else []
    if model.layers_kept < layers:
        others.append(f"the first {model.layers_kept} layers instead of {layers}")
    if others:
        raise DataError(
            f"{path} was measured with {', '.join(others)}: give another --store, or delete it."
        )
    return kept


def measure_injection(
    backend: CaptureBackend,
    texts: Sequence[LabelledText],
    *,
    instruction: str = DEFAULT_INSTRUCTION,
    model: ModelInfo | None = None,
    data: str = "",
    on_progress: Callable[[int, int], None] | None = None,
) -> InjectionAttention:
    """Read every head at the last token of each text's prompt.

    Args:
        backend: runs the model, with all its layers or the first few.
        texts: what to measure; an empty text draws nothing.
        instruction: the task of texts that have none of their own.
        model: what to say of the model, where more is known than ``backend.model`` says.
        data: what the texts are called.
        on_progress: called with (texts done, texts in all).

    Raises:
        PromptError: a text does not fit the model.
        NotFiniteError: the engine returned NaN.
    """
    import numpy as np

    info = model or backend.model
    builder = GuardedPromptBuilder(backend.tokenizer, info.max_model_len)
    prompts = [builder.build(t.instruction or instruction, t.text) for t in texts]
    masses = np.empty((len(texts), info.layers_kept, info.num_heads, 2), np.float32)
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        captures = backend.capture([guarded_request(prompt, "all") for prompt in part])
        for row, (prompt, capture) in enumerate(zip(part, captures, strict=True), start):
            masses[row] = instruction_and_data(prompt, capture).reshape(masses.shape[1:])
        if on_progress is not None:
            on_progress(start + len(part), len(prompts))
    return InjectionAttention(
        masses=masses,
        tokens=np.array([prompt.data_tokens for prompt in prompts], np.int32),
        attack=np.array([t.attack for t in texts], bool),
        groups=tuple(t.group for t in texts),
        measurement=InjectionMeasurement(
            model=info,
            data=data,
            data_hash=data_hash(texts),
            instruction=instruction,
            prompt_hash=_digest(builder.build("instruction", "data").token_ids),
            versions=package_versions(),
        ),
    )


def measuring_options(backend: str) -> dict[str, Any]:
    """Engine options for measuring: exact numbers, and on vLLM no compiling for a single pass."""
    return {"dtype": "float32", **({} if backend == "transformers" else {"enforce_eager": True})}


def data_hash(texts: Sequence[LabelledText]) -> str:
    """A hash of the texts with their labels, instructions and groups."""
    return _digest(list(texts))


def _digest(value: object) -> str:
    return blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
