"""A plan for whole layers, cut: for the shards of them that a rank holds, or into fragments that take turns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
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
        if reason := plan._built[group.name].traits.whole_layers:
            yield group, reason


def fragments_of(plan: Plan, count: int) -> list[Plan]:
    """Cut a plan into plans of consecutive layers with about as many elements each. No group is cut, and no refresh."""
    if count == 1:
        return [plan]
    _refuse_refresh(plan, count)
    parts = _inseparable(plan)
    if len(parts) < count:
        raise GradlabError(
            f"fragments = {count}, and the plan has {len(parts)} groups and dense layers, which are not cut; make a "
            "plan with smaller groups (group_bytes=)"
        )
    return [_part(plan, members) for members in _balanced(parts, count)]


def cut_like(plan: Plan, fragments: Sequence[Collection[str]]) -> list[Plan]:
    """Cut a plan where another one of the same layers was cut, given the names of each fragment's layers."""
    _refuse_refresh(plan, len(fragments))
    for group in plan.groups:
        if not any(set(group.layers) <= set(names) for names in fragments):
            raise GradlabError(
                f"group {group.name} has layers of several of the {len(fragments)} fragments; make a plan with smaller "
                "groups (group_bytes=)"
            )
    return [_part(plan, [layer for layer in plan.layers if layer.name in names]) for names in fragments]


def _refuse_refresh(plan: Plan, count: int) -> None:
    if plan.refresh is not None and count > 1:
        raise GradlabError("the plan has a refresh, which chooses for all layers together: use fragments = 1")


def _inseparable(plan: Plan) -> list[list[Layer]]:
    """The layers of each group, and each layer of no group, in the order of their first layers."""
    group_of = {name: group for group in plan.groups for name in group.layers}
    parts: dict[str, list[Layer]] = {}
    for layer in plan.layers:
        group = group_of.get(layer.name)
        parts.setdefault(f"layer {layer.name}" if group is None else f"group {group.name}", []).append(layer)
    return list(parts.values())


def _balanced(parts: Sequence[list[Layer]], count: int) -> list[list[Layer]]:
    """Cut a list of parts where the elements so far are nearest to an equal share, and leave none empty."""
    sizes = [sum(layer.numel for layer in part) for part in parts]
    total, ends, before = sum(sizes), [0], 0
    for number in range(1, count):
        end, last = ends[-1] + 1, len(parts) - (count - number)
        before = sum(sizes[:end])
        while end < last and before + sizes[end] / 2 <= total * number / count:
            before += sizes[end]
            end += 1
        ends.append(end)
    bounds = zip(ends, [*ends[1:], len(parts)], strict=True)
    return [[layer for part in parts[first:last] for layer in part] for first, last in bounds]


def _part(plan: Plan, members: Sequence[Layer]) -> Plan:
    names = {layer.name for layer in members}
    groups: tuple[Group, ...] = tuple(group for group in plan.groups if group.layers[0] in names)
    learned = {group.name: plan.learned[group.name] for group in groups if group.name in plan.learned}
    layers = tuple(layer for layer in plan.layers if layer.name in names)
    return replace(plan, layers=layers, groups=groups, learned=learned)
