"""A plan cut into fragments of the model, which take their outer steps in turn."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan.plan import Group, Plan


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
