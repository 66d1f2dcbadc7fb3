"""Head sets: which heads of which model tell a relevant document, and where that is known from."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hook_runtime.errors import ProbeError
from hook_runtime.specs import Head, ModelInfo

from .errors import HeadSetError
from .files import write_yaml

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Window = int | Literal["all"]
MODEL_SCALE = "model"
_ANOTHER_MODEL = "heads found on one model mean nothing on another, so give that model's own"


@dataclass(frozen=True, slots=True)
class HeadSet:
    """Retrieval heads of one model, best first; the schema is in ``configs/README.md``.

    Attributes:
        model: Hugging Face id.
        num_layers, num_heads: the model's shape (heads per layer).
        heads: best first.
        method: how they were found, such as "core" or "qrhead".
        revision: the commit they were found on, where it is known.
        aliases: other names of the same model.
        default: used when the model is named and no head set is; one per model.
        window: the recommended window: "all" documents in one prompt, or at most so many.
        calibrate: whether the attention under the null query is to be subtracted.
        temperature: of CoRe's contrastive softmax.
        scale: scale of the attention logits at detection; "model" is the model's own.
        data, source, notes: what they were found on, who says so, what else to know.
        scores: one per head, where they are known.
        weights: one per head, not 0; attention is then summed by them. None: a plain sum.
        found_with: versions and hashes of the detection run.
    """

    model: str
    num_layers: int
    num_heads: int
    heads: tuple[Head, ...]
    method: str
    revision: str | None = None
    aliases: tuple[str, ...] = ()
    default: bool = True
    window: Window = "all"
    calibrate: bool = True
    temperature: float | None = None
    scale: str = MODEL_SCALE
    data: str = ""
    source: str = ""
    notes: str = ""
    scores: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    found_with: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            expected, read = _READERS[item.name]
            try:
                object.__setattr__(self, item.name, read(getattr(self, item.name)))
            except (TypeError, ValueError) as error:
                found = f" ({error})" if isinstance(error, ProbeError) else ""
                raise HeadSetError(
                    f"{item.name!r} must be {expected}, not {getattr(self, item.name)!r}{found}."
                ) from None
        if len(set(self.heads)) != len(self.heads):
            raise HeadSetError(f"'heads' names a head twice: {' '.join(map(str, self.heads))}.")
        for head in self.heads:
            if head.layer >= self.num_layers or head.head >= self.num_heads:
                raise HeadSetError(
                    f"'heads' names {head}, but 'num_layers' is {self.num_layers} and 'num_heads' "
                    f"is {self.num_heads}; both numbers of a head count from zero."
                )
        for name, numbers in (("scores", self.scores), ("weights", self.weights)):
            if numbers is not None and len(numbers) != len(self.heads):
                raise HeadSetError(
                    f"{name!r} has {len(numbers)} numbers for {len(self.heads)} heads."
                )

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> HeadSet:
        """Read a head set; HeadSetError names the file and the key, OSError if there is none."""
        path = Path(path)
        return _parse(path.read_text(encoding="utf-8"), str(path))

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write the head set, replacing ``path`` in one step; leaves out keys at their default."""
        write_yaml(Path(path), self._plain())

    def is_for(self, model_id: str) -> bool:
        """Whether ``model_id`` names this set's model (upper and lower case are the same)."""
        return model_id.casefold() in {name.casefold() for name in (self.model, *self.aliases)}

    def check_model_id(self, model_id: str) -> None:
        """HeadSetError if ``model_id`` names another model; a local folder may hold any."""
        if not self.is_for(model_id) and not Path(model_id).is_dir():
            raise HeadSetError(
                f"the head set is for {self.model}, not for {model_id}: {_ANOTHER_MODEL}."
            )

    def check(self, model: ModelInfo, model_id: str) -> None:
        """Refuse to go on with another model than the one the heads were found on.

        A local folder has no id: where only the shape can be compared, and is the same, a
        UserWarning names both. So does one for another revision.

        Raises:
            HeadSetError: ``model_id`` or the number of layers or heads differs.
            ProbeError: a head lies beyond the layers that were kept.
        """
        self.check_model_id(model_id)
        given = (model.num_layers, model.num_heads)
        if given != (self.num_layers, self.num_heads):
            raise HeadSetError(
                f"the head set is for {self.model} with {self.num_layers} layers of "
                f"{self.num_heads} heads, but {model.name} has {given[0]} layers of {given[1]}: "
                f"{_ANOTHER_MODEL}."
            )
        model.check_heads(self.heads)
        if not self.is_for(model_id):
            _warn(
                f"taking the model in {model_id} for {self.model}, whose heads are used: only the "
                f"number of layers and heads was compared. {_ANOTHER_MODEL.capitalize()}."
            )
        elif None not in (self.revision, model.revision) and self.revision != model.revision:
            _warn(
                f"the head set for {self.model} was found on revision {self.revision}, but "
                f"revision {model.revision} is loaded."
            )

    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "heads":
                plain["heads"] = [str(head) for head in self.heads]
            elif item.name == "default" or value not in (item.default, {}):
                plain[item.name] = list(value) if isinstance(value, tuple) else value
        return plain


def _warn(message: str) -> None:
    """A UserWarning at the caller of whoever checked a head set: the line that made a Reranker."""
    warnings.warn(message, UserWarning, stacklevel=4)


def find_head_set(model_id: str) -> HeadSet | None:
    """The packaged default head set of a model, by id or alias; None where there is none."""
    for head_set in packaged_head_sets():
        if head_set.default and head_set.is_for(model_id):
            return head_set
    return None


@cache
def packaged_head_sets() -> tuple[HeadSet, ...]:
    """Every head set that comes with the package, by file name."""
    return tuple(packaged_files().values())


@cache
def packaged_files() -> Mapping[str, HeadSet]:
    """The packaged head sets by the names of their files in `config_folder`, in order."""
    files = sorted(config_folder().iterdir(), key=lambda file: file.name)
    return {
        file.name: _parse(file.read_text(encoding="utf-8"), file.name)
        for file in files
        if file.name.endswith(".yaml")
    }


def config_folder() -> Traversable:
    """Where the packaged head sets are."""
    try:
        return resources.files("core_rerank.configs") / "core_rerank"
    except ModuleNotFoundError:
        # An uninstalled checkout on the path: only an install maps the folder into the package.
        return resources.files("core_rerank") / ".." / "configs" / "core_rerank"


def _parse(text: str, where: str) -> HeadSet:
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HeadSetError(f"{where} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise HeadSetError(f"{where} must hold keys and values, not {type(data).__name__}.")
    unknown = [str(key) for key in data if key not in _READERS]
    if unknown:
        raise HeadSetError(
            f"{where}: unknown key {unknown[0]!r}; the keys are {', '.join(_READERS)}."
        )
    missing = [key for key in _REQUIRED if key not in data]
    if missing:
        raise HeadSetError(f"{where}: key {missing[0]!r} is missing.")
    try:
        return HeadSet(**data)
    except HeadSetError as error:
        raise HeadSetError(f"{where}: {error}") from None


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _name(value: object) -> str:
    if not _string(value).strip():
        raise ValueError
    return _string(value)


def _positive(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError
    return value


def _number(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError
    return float(value)


def _weight(value: object) -> float:
    if not 0 < abs(_number(value)) < math.inf:
        raise ValueError
    return _number(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _list(value: object) -> Sequence[object]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError
    return value


def _heads(value: object) -> tuple[Head, ...]:
    if not _list(value):
        raise ValueError
    return tuple(Head.parse(head) for head in _list(value))


def _window(value: object) -> Window:
    return "all" if value == "all" else _positive(value)


def _texts(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {_string(key): _string(text) for key, text in value.items()}


def _optional(read: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else read(value)


_READERS: dict[str, tuple[str, Callable[[object], Any]]] = {
    "model": ("a Hugging Face id", _name),
    "num_layers": ("a whole number from 1", _positive),
    "num_heads": ("a whole number from 1", _positive),
    "heads": ("a list of heads such as '15-7', best first", _heads),
    "method": ("a name such as 'core' or 'qrhead'", _name),
    "revision": ("a commit, in quotes, or null", _optional(_name)),
    "aliases": ("a list of names", lambda value: tuple(_name(v) for v in _list(value))),
    "default": ("true or false", _flag),
    "window": ("'all' or a whole number from 1", _window),
    "calibrate": ("true or false", _flag),
    "temperature": ("a number or null", _optional(_number)),
    "scale": ("'model' or a formula", _name),
    "data": ("text", _string),
    "source": ("text", _string),
    "notes": ("text", _string),
    "scores": (
        "a list of numbers, one per head, or null",
        _optional(lambda value: tuple(_number(v) for v in _list(value))),
    ),
    "weights": (
        "a list of numbers other than 0, one per head, or null",
        _optional(lambda value: tuple(_weight(v) for v in _list(value))),
    ),
    "found_with": ("texts by name", _texts),
}
_REQUIRED = ("model", "num_layers", "num_heads", "heads", "method")
