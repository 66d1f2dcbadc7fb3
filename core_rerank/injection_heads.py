"""Which heads of a model tell an attack, how they are summed and from which score on it is one."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)

from hook_runtime.errors import ProbeError
from hook_runtime.specs import Head, ModelInfo, parse_heads

from .errors import HeadSetError
from .files import write_yaml
from .heads import HeadSet

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

Task = Literal["instruction", "document"]


def _parsed(value: object) -> tuple[Head, ...]:
    try:
        return parse_heads(value)
    except ProbeError as error:
        raise ValueError(str(error)) from None


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


Heads = Annotated[tuple[InstanceOf[Head], ...], BeforeValidator(_parsed)]
Weights = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]


class InjectionHeads(BaseModel):
    """Heads that see less of the instruction when something else draws them; found on one model.

    ``task`` says what they were found for: "instruction", data beside a trusted instruction, or
    "document", a document of a ranking prompt. See `injection_scoring` for the score that
    ``weights``, ``intercept`` and ``threshold`` belong to.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str = Field(min_length=1, description="Hugging Face id.")
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1, description="Query heads of a layer.")
    heads: Heads = Field(description="Heads such as '15-7', best first.")
    threshold: float = Field(ge=0, le=1, description="A score above it is flagged.")
    method: str = Field(min_length=1, description="How they were found: k-sigma or signed.")
    task: Task = "instruction"
    weights: Weights | None = Field(None, description="One per head; null: a plain mean.")
    intercept: float = Field(0.0, description="Of the weighted score; 0 without weights.")
    revision: str | None = Field(None, description="Of the model they were found on.")
    aliases: Names = ()
    default: bool = True
    instruction: str = Field("", description="What rows without one were measured under.")
    data: str = ""
    source: str = ""
    notes: str = ""
    found_with: Mapping[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits_together(self) -> InjectionHeads:
        if self.weights is not None and len(self.weights) != len(self.heads):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.heads)} heads")
        if self.weights is None and self.intercept:
            raise ValueError("intercept belongs to weights, and there are none")
        if not all(math.isfinite(number) for number in (*(self.weights or ()), self.intercept)):
            raise ValueError("weights and intercept must be finite")
        for head in self.heads:
            if head.layer >= self.num_layers or head.head >= self.num_heads:
                raise ValueError(
                    f"heads names {head}, but num_layers is {self.num_layers} and num_heads is "
                    f"{self.num_heads}; both numbers of a head count from zero"
                )
        return self

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> InjectionHeads:
        """Read a file; HeadSetError names the file and the key, OSError if there is none."""
        path = Path(path)
        return parse(path.read_text(encoding="utf-8"), str(path))

    def to_yaml(self, path: str | os.PathLike[str]) -> None:
        """Write the file, replacing it in one step; leaves out keys at their default."""
        plain = self.model_dump(exclude_defaults=True)
        plain["heads"] = [str(head) for head in self.heads]
        for name in ("weights", "aliases"):
            if name in plain:
                plain[name] = list(plain[name])
        write_yaml(Path(path), plain)

    @cached_property
    def head_set(self) -> HeadSet:
        """The same heads as a `HeadSet`, which knows how to check a model."""
        return HeadSet(
            model=self.model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            heads=self.heads,
            method=self.method,
            revision=self.revision,
            aliases=self.aliases,
        )

    def check(self, model: ModelInfo, model_id: str, task: Task) -> None:
        """HeadSetError for another model (see ``HeadSet.check``) or another task."""
        if self.task != task:
            raise HeadSetError(
                f"these heads were found for the task {self.task!r}, not for {task!r}: find some "
                "with `core-rerank detect-heads --task injection`."
            )
        self.head_set.check(model, model_id)


def find_injection_heads(model_id: str, task: Task) -> InjectionHeads | None:
    """The packaged heads of a model for ``task``, by id or alias; None where there are none."""
    for found in packaged_injection_heads():
        if found.default and found.task == task and found.head_set.is_for(model_id):
            return found
    return None


@cache
def packaged_injection_heads() -> tuple[InjectionHeads, ...]:
    """Every injection head set that comes with the package, by file name."""
    files = sorted(_folder().iterdir(), key=lambda file: file.name)
    return tuple(
        parse(file.read_text(encoding="utf-8"), file.name)
        for file in files
        if file.name.endswith(".yaml")
    )


def parse(text: str, where: str) -> InjectionHeads:
    """The heads that a YAML text holds; ``where`` names it in errors."""
    import yaml

    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HeadSetError(f"{where} is not valid YAML: {error}") from None
    if not isinstance(data, dict):
        raise HeadSetError(f"{where} must hold keys and values, not {type(data).__name__}.")
    try:
        return InjectionHeads.model_validate(data)
    except ValidationError as error:
        told = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors()]
        keys = ", ".join(InjectionHeads.model_fields)
        raise HeadSetError(f"{where}: {'; '.join(told)}. The keys are {keys}.") from None


def _folder() -> Traversable:
    try:
        return resources.files("core_rerank.configs") / "injection"
    except ModuleNotFoundError:
        # An uninstalled checkout on the path: only an install maps the folder into the package.
        return resources.files("core_rerank") / ".." / "configs" / "injection"
