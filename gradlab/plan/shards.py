"""A plan for whole layers, on the shards of them that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.plan import Group, Plan


def shard_plan(plan: Plan, shapes: Mapping[str, tuple[int, ...]], units: Mapping[str, str]) -> Plan:
    """Make the plan of one rank's shards: the same groups, codecs and settings, on other shapes.

    A codec then sees the rows that the rank holds. PowerSGD approximates them, not the whole matrix, by its rank.
    A layer whose shard is empty leaves its group. A group with layers of several units becomes one for each, because
    what FSDP has of a unit must be final before the next one comes.

    Args:
        plan: for the whole layers.
        shapes: of the shards, by layer name, all of the plan's.
        units: by layer name, the module that it travels with.

    Returns:
        The plan.

    Raises:
        GradlabError: for a codec or a wrapper that needs whole layers, naming what it needs.
    """
    for group in plan.compressed_groups:
        if reason := plan.build(group).needs_whole_layers:
            layer = next(one for one in plan.layers if one.name == group.layers[0])
            raise GradlabError(
                f"group {group.name}: codec {group.codec} cannot work on shards, as {reason}; {layer.name} has the "
                f"shape {list(layer.shape)}, and this rank holds {list(shapes[layer.name])} of it"
            )
    if plan.refresh is not None:
        raise GradlabError("the plan has a refresh, whose tables are of whole layers; make it without for shards")
    layers = tuple(Layer(layer.name, tuple(shapes[layer.name]), layer.role) for layer in plan.layers)
    filled = {layer.name for layer in layers if math.prod(layer.shape)}
    groups = tuple(part for group in plan.groups for part in _parts(group, filled, units))
    return replace(plan, layers=layers, groups=groups)


def _parts(group: Group, filled: Collection[str], units: Mapping[str, str]) -> list[Group]:
    """A group by unit, without its empty layers."""
    by_unit: dict[str, list[str]] = {}
    for name in group.layers:
        by_unit.setdefault(units[name], [])
        if name in filled:
            by_unit[units[name]].append(name)
    whole = len(by_unit) == 1
    return [
        replace(group, name=group.name if whole else f"{group.name} in {unit or 'the rest'}", layers=tuple(names))
        for unit, names in by_unit.items()
        if names
    ]
