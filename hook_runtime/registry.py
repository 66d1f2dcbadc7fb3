"""Probes, interventions and analyzers by name: the built-in ones, and those of other packages.

A package adds its own by Python entry points, whose names are the classes' ``kind``::

    [project.entry-points."hook_runtime.interventions"]
    clamp = "their_package.module:Clamp"

They are imported in the caller's process and in vLLM's workers, so the package must be installed
where these run; nothing but the name and the parameters goes from one to the other.
"""

from __future__ import annotations

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


def names(group: Group) -> list[str]:
    """Every name of the group, without importing what other packages registered."""
    return sorted({*_built_in(group), *_entry_points(group)})


@functools.cache
def _entry_points(group: Group) -> dict[str, Any]:
    return {point.name: point for point in entry_points(group=f"hook_runtime.{group}")}


@functools.cache
def find(group: Group, name: str) -> Any:
    """The class or function registered under ``name``; ProbeError where there is none."""
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
    found = point.load()
    if group != "analyzers" and getattr(found, "kind", None) != name:
        raise ProbeError(
            f"{point.value} is registered as {name!r}, but its kind is "
            f"{getattr(found, 'kind', None)!r}: they must be the same."
        )
    return found
