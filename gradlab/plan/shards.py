"""A plan for whole layers, on the shards of them that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.node_rules import conflict_on_shards, groups_of_whole_layers
from gradlab.plan.plan import Group, Plan


def shard_plan(plan: Plan, shapes: Mapping[str, tuple[int, ...]], units: Mapping[str, str]) -> Plan:
    """Make the plan of one rank's shards: the same groups, codecs and settings, on other shapes; an empty shard leaves
    its group. A group of several units becomes one for each, as FSDP ends them one by one."""
    if conflict := conflict_on_shards(plan):
        raise GradlabError(conflict + _first_shard(plan, shapes))
    layers = tuple(Layer(layer.name, tuple(shapes[layer.name]), layer.role) for layer in plan.layers)
    filled = {layer.name for layer in layers if math.prod(layer.shape)}
    groups = tuple(part for group in plan.groups for part in _parts(group, filled, units))
    return replace(plan, layers=layers, groups=groups)


def _first_shard(plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Say what a rank holds of the first layer that has to be whole; nothing if none has to."""
    for group, _ in groups_of_whole_layers(plan):
        layer = next(one for one in plan.layers if one.name == group.layers[0])
        return f"; {layer.name} has the shape {list(layer.shape)}, and this rank holds {list(shapes[layer.name])} of it"
    return ""


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
