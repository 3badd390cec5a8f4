"""A plan for whole layers, on the shards of them that a rank holds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from gradlab.errors import GradlabError
from gradlab.layout import Layer
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


def conflict_between_nodes(plan: Plan) -> str:
    """Return why a plan cannot run where a node's ranks share out its groups under DDP, with a remedy; empty: it
    can."""
    if plan.refresh is None:
        return ""
    return (
        "the plan has a refresh, which measures all groups on every rank; between nodes a rank holds the groups "
        "that it owns: make the plan without refresh, or compress between ranks (within=None)"
    )


def conflict_on_shards(plan: Plan) -> str:
    """Return why a plan for whole layers cannot run on the shards that FSDP2 leaves a rank; empty: it can."""
    for group, reason in groups_of_whole_layers(plan):
        return f"group {group.name}: codec {group.codec} cannot work on shards, as {reason}"
    if plan.refresh is not None:
        return "the plan has a refresh, whose tables are of whole layers; make it without for shards"
    return ""


def groups_of_whole_layers(plan: Plan) -> Iterator[tuple[Group, str]]:
    """Yield each group whose codec or wrapper needs whole layers, with the reason."""
    for group in plan.compressed_groups:
        if reason := plan.build(group).traits.whole_layers:
            yield group, reason
