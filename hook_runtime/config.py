"""Programs in files: what a config may say (its JSON schema), and how one is read.

YAML or JSON. Paths in it are relative to its own folder; vectors come from safetensors only.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PydanticUserError,
    Strict,
    ValidationError,
    create_model,
)

from .analyzers import Analyzer
from .errors import ConfigError, ProbeError
from .programs import Program
from .registry import GROUPS, Group, built_in_names, find, names
from .specs import Head
from .templates import AttentionTemplate
from .vectors import Vector

STRICT = ConfigDict(extra="forbid", strict=True)


class VectorFile(BaseModel):
    """A tensor of a safetensors file, [hidden] or [layers, hidden]."""

    model_config = STRICT

    file: str = Field(description="Path of the safetensors file, relative to the config's folder.")
    name: str | None = Field(None, description="The tensor's name; needed where there are several.")


_ALTERNATIVES = ("str", VectorFile.__name__)
HeadText = Annotated[str, Field(pattern=r"^\d+-\d+$", examples=["15-7"])]


@dataclass(frozen=True)
class ProgramConfig:
    """What a config says, checked as far as it can be without the model.

    Attributes:
        model, revision: what to load.
        program: its probes and interventions.
        attention: the attention probe, if it has one.
        analyzer: what makes numbers of what was read, if anything.
    """

    model: str
    revision: str | None
    program: Program
    attention: AttentionTemplate | None
    analyzer: Analyzer | None


def load_config(path: str | Path) -> ProgramConfig:
    """Read and check a config; the file's ending decides between YAML and JSON.

    Raises:
        ConfigError: names the file, the key, and what is allowed there.
    """
    path = Path(path)
    data = _read(path)
    known = [_named(data, group) for group in GROUPS]
    return _checked(data, str(path), known, lambda value: _from_file(value, path.parent))


def read_config(data: Any, where: str, vectors: Mapping[str, Vector]) -> ProgramConfig:
    """As ``load_config``, of what a stranger sent: no path is followed, nobody's code imported.

    Args:
        data: what the JSON of a config says; its ``type``s must be built in.
        where: what errors call it.
        vectors: by the names that the config has in place of files.
    """

    def named(value: str | VectorFile) -> Vector:
        if not isinstance(value, str) or value not in vectors:
            given = value if isinstance(value, str) else value.file
            sent = ", ".join(sorted(vectors)) or "none"
            raise ProbeError(f"there is no tensor {given!r} among those sent ({sent}).")
        return vectors[value]

    return _checked(data, where, [tuple(built_in_names(group)) for group in GROUPS], named)


def _checked(
    data: Any,
    where: str,
    known: Sequence[tuple[str, ...]],
    vector: Callable[[str | VectorFile], Vector],
) -> ProgramConfig:
    try:
        checked: Any = schema(*known).model_validate(data)
    except ValidationError as error:
        raise ConfigError(_explain(where, error)) from None
    except ProbeError as error:
        raise ConfigError(f"{where}: {error}") from error
    attention: list[AttentionTemplate] = []
    probes: list[Any] = []
    for i, entry in enumerate(checked.probes):
        made = _make("probes", entry, where, f"probes[{i}]", vector)
        (attention if isinstance(made, AttentionTemplate) else probes).append(made)
    if len(attention) > 1:
        raise ConfigError(f"{where}: probes: one attention probe at most, not {len(attention)}.")
    interventions = [
        _make("interventions", entry, where, f"interventions[{i}]", vector)
        for i, entry in enumerate(checked.interventions)
    ]
    analyzer = None
    if checked.analyzer is not None:
        analyzer = _make("analyzers", checked.analyzer, where, "analyzer", vector)
    return ProgramConfig(
        checked.model,
        checked.revision,
        Program(tuple(probes), tuple(interventions)),
        attention[0] if attention else None,
        analyzer,
    )


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config, with whatever is registered here.

    Raises:
        ProbeError: another package registered something that cannot be loaded.
    """
    found = schema(*(tuple(names(group)) for group in GROUPS)).model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


@functools.cache
def schema(*known: tuple[str, ...]) -> type[BaseModel]:
    """The pydantic model of a config that knows these names of each of the `GROUPS`."""
    probes, interventions, analyzers = map(_any_of, GROUPS, known)
    lists: dict[str, Any] = {
        "probes": (list[probes], Field(default_factory=list)),
        "interventions": (list[interventions], Field(default_factory=list)),
        "analyzer": (analyzers | None, None),
    }
    return create_model(
        "ProgramConfig",
        __config__=STRICT,
        __doc__="A program for hook_runtime: what to read and change inside a model.",
        model=(str, Field(description="Hugging Face id or local folder.", min_length=1)),
        revision=(str | None, Field(None, description="Commit, tag or branch of the model.")),
        **lists,
    )


# ---------------------------------------------------------------- the schema


def _named(data: Any, group: Group) -> tuple[str, ...]:
    """The built-in names of the group, and those that the config names: no other is imported."""
    table = data if isinstance(data, dict) else {}
    found = table.get("analyzer" if group == "analyzers" else group)
    entries = found if isinstance(found, list) else [found]
    types = [entry.get("type") for entry in entries if isinstance(entry, dict)]
    return tuple(n for n in names(group) if n in types or n in built_in_names(group))


def _any_of(group: Group, known: tuple[str, ...]) -> Any:
    """Any of the group's classes with these names, told apart by ``type``."""
    kinds = []
    for name in known:
        kind = find(group, name)
        try:
            kinds.append(_entry(kind))
        except (NameError, TypeError, PydanticUserError) as error:
            raise ProbeError(
                f"{group[:-1]} {name!r} ({kind.__module__}:{kind.__qualname__}) has fields that "
                f"no config can hold: {type(error).__name__}: {error}"
            ) from error
    union = functools.reduce(operator.or_, kinds)
    return Annotated[union, Field(discriminator="type")] if len(kinds) > 1 else union


def _entry(kind: Any) -> Any:
    """A dataclass's fields as a pydantic model with a ``type``."""
    hints = typing.get_type_hints(kind)
    values: dict[str, Any] = {"type": (Literal[kind.kind], ...)}
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        values[field.name] = (_in_files(hints[field.name]), _default(field))
    doc = (kind.__doc__ or "").strip().partition("\n\n")[0]
    return create_model(
        kind.__name__,
        __config__=STRICT,
        __doc__=" ".join(doc.split()),
        **values,
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return Field(default_factory=field.default_factory)
    return ... if field.default is dataclasses.MISSING else field.default


def _in_files(hint: Any) -> Any:
    """The type as a file writes it: vectors by path, heads as text."""
    if hint is Vector:
        return str | VectorFile
    if hint is Head:
        return HeadText
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        inner = tuple(a if a is Ellipsis else _in_files(a) for a in arguments)
        if inner[-1] is Ellipsis:
            return Annotated[list[inner[0]], Field(min_length=1)]
        return Annotated[tuple[inner], Strict(False)]  # type: ignore[valid-type]
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, (_in_files(a) for a in arguments))
    return hint


# ---------------------------------------------------------------- one file


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from error
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix in (".yaml", ".yml"):
            import yaml

            return yaml.safe_load(text)
    except Exception as error:
        raise ConfigError(f"{path}: not valid {path.suffix[1:].upper()}: {error}") from error
    raise ConfigError(f"{path}: a config ends in .yaml, .yml or .json.")


def _make(
    group: Group,
    entry: BaseModel,
    where: str,
    key: str,
    vector: Callable[[str | VectorFile], Vector],
) -> Any:
    values: dict[str, Any] = {}
    for name in type(entry).model_fields:
        if name != "type":
            values[name] = getattr(entry, name)
    kind = find(group, entry.type)  # type: ignore[attr-defined]
    hints = typing.get_type_hints(kind)
    for name, value in values.items():
        if _holds_vector(hints[name]) and value is not None:
            try:
                values[name] = vector(value)
            except ProbeError as error:
                raise ConfigError(f"{where}: {key}.{name}: {error}") from error
        elif isinstance(value, list):
            values[name] = tuple(value)
    try:
        return kind(**values)
    except ProbeError as error:
        raise ConfigError(f"{where}: {key}: {error}") from error
    except Exception as error:  # another package's code may raise anything
        raise ConfigError(f"{where}: {key}: {type(error).__name__}: {error}") from error


def _holds_vector(hint: Any) -> bool:
    return hint is Vector or Vector in typing.get_args(hint)


def _from_file(value: str | VectorFile, folder: Path) -> Vector:
    wanted = VectorFile(file=value, name=None) if isinstance(value, str) else value
    file = folder / wanted.file
    if file.suffix != ".safetensors":
        raise ProbeError(f"vectors are read from .safetensors files only, not {wanted.file!r}.")
    return Vector.load(file, wanted.name)


def _explain(where: str, error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = _key(problem["loc"])
        lines.append(f"{where}: {key or 'the whole file'}: {_message(problem)}")
    return "\n".join(dict.fromkeys(lines))


def _key(place: Sequence[str | int]) -> str:
    """``probes[0].layers``, without the types and alternatives that pydantic names as well."""
    entry = 1 if place[:1] == ("analyzer",) else 2
    tagged = place[:1] in (("probes",), ("interventions",), ("analyzer",))
    written = ""
    for i, part in enumerate(place):
        if isinstance(part, int):
            written += f"[{part}]"
        elif not (tagged and i == entry) and part.isidentifier() and part not in _ALTERNATIVES:
            written += f".{part}" if written else part
    return written


def _message(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        return "there is no such key."
    if problem["type"] == "missing":
        return "this key is needed."
    if problem["type"] == "union_tag_invalid":
        group: Group = "analyzers" if problem["loc"][0] == "analyzer" else problem["loc"][0]
        allowed = ", ".join(map(repr, names(group)))
        return f"type {problem['ctx']['tag']!r} is not one of {allowed}."
    if problem["type"] == "union_tag_not_found":
        return "the key 'type' is needed: it says which one is meant."
    return f"{problem['msg']}, but the value is {problem['input']!r:.80}."
