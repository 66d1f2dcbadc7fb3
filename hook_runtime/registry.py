"""Probes, interventions and analyzers by name: the built-in ones, and those of other packages.

A package adds its own by Python entry points, whose names are the classes' ``kind``::

    [project.entry-points."hook_runtime.interventions"]
    clamp = "their_package.module:Clamp"

They are imported in the caller's process and in vLLM's workers, so the package must be installed
where these run; nothing but the name and the parameters goes from one to the other.
"""

from __future__ import annotations

import dataclasses
import functools
from importlib.metadata import entry_points
from typing import Any, Literal

from .errors import ProbeError

Group = Literal["probes", "interventions", "analyzers"]
GROUPS: tuple[Group, ...] = ("probes", "interventions", "analyzers")


def _built_in(group: Group) -> dict[str, Any]:
    from . import analyzers, interventions, probes, templates

    if group == "probes":
        found: list[Any] = [
            probes.HiddenStateProbe,
            probes.HeadOutputProbe,
            templates.AttentionTemplate,
        ]
    elif group == "interventions":
        found = [
            interventions.AddVector,
            interventions.ProjectTo,
            interventions.Ablate,
            interventions.ScaleHeads,
        ]
    else:
        found = [analyzers.AttentionMass, analyzers.Projection]
    return {kind.kind: kind for kind in found}


def built_in_names(group: Group) -> list[str]:
    """Names of the group that need no other package."""
    return sorted(_built_in(group))


def names(group: Group) -> list[str]:
    """Every name of the group, without importing what other packages registered."""
    return sorted({*_built_in(group), *_entry_points(group)})


@functools.cache
def _entry_points(group: Group) -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=f"hook_runtime.{group}")}


@functools.cache
def find(group: Group, name: str) -> Any:
    """The class registered under ``name``.

    Raises:
        ProbeError: there is none, or another package's cannot be loaded or is no such class.
    """
    built_in = _built_in(group)
    point = _entry_points(group).get(name)
    if point is None:
        if name not in built_in:
            raise ProbeError(
                f"there is no {group[:-1]} {name!r}; there are {', '.join(names(group)) or 'none'}."
            )
        return built_in[name]
    if name in built_in:
        raise ProbeError(f"{point.value} registers {name!r}, which is built in: rename it.")
    where = f"the entry point {name!r} of hook_runtime.{group} ({point.value})"
    try:
        found = point.load()
    except Exception as error:  # another package's code may raise anything
        raise ProbeError(f"{where} cannot be loaded: {type(error).__name__}: {error}") from error
    base, kind = _base(group), getattr(found, "kind", None)
    if not isinstance(found, type) or not issubclass(found, base):
        raise ProbeError(f"{where} must be a class that derives from {base.__name__}: {found!r}.")
    if not dataclasses.is_dataclass(found):
        raise ProbeError(f"{where} must be a dataclass, whose fields are its parameters.")
    if kind != name:
        raise ProbeError(
            f"{where} is registered as {name!r}, but its kind is {kind!r}: they must be the same."
        )
    return found


def _base(group: Group) -> Any:
    from . import analyzers, interventions, probes

    return {
        "probes": probes.StateProbe,
        "interventions": interventions.Intervention,
        "analyzers": analyzers.Analyzer,
    }[group]
