"""Group a plan's layers as `Plan.uniform` groups those of a model on a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradlab import codecs
from gradlab.codec.wrapper import innermost
from gradlab.plan.plan import EACH_BY_ITSELF, GPU_GROUP_BYTES, Group, Plan, group_name, may_span
from gradlab.segments import segments


def in_gpu_groups(plan: Plan) -> Plan:
    """Let consecutive groups that are compressed alike share groups of at most 25 MiB, in which each layer keeps its
    own scales and selection.

    >>> from gradlab.layout import Layer
    >>> from gradlab.plan import Plan
    >>> plan = Plan.uniform([Layer("a", (64, 64), "linear"), Layer("b", (64, 64), "linear")], "topk")
    >>> [group.name for group in plan.groups], [group.name for group in in_gpu_groups(plan).groups]
    (['a', 'b'], ['a to b'])
    """
    if plan.refresh is not None:
        return plan
    runs = itertools.groupby(plan.groups, key=lambda group: _alike(group, plan))
    return replace(plan, groups=tuple(joined for _, run in runs for joined in _joined(list(run), plan)))


def _alike(group: Group, plan: Plan) -> object:
    """Return what groups that may be joined have in common. Others have their own name: those with learned tensors,
    those of layers that have to be alone, and those that select from several layers together."""
    if group.plainly_dense or group.name in plan.learned or codecs.get(group.codec).about.defaults.group_bytes == 0:
        return group.name
    if _may_span(group, plan) and group.settings.get("across_layers", len(group.layers) > 1):
        return group.name
    return replace(_settled(group, plan), name="", layers=()).to_json()


def _may_span(group: Group, plan: Plan) -> bool:
    return may_span(innermost(plan.build(group)))


def _settled(group: Group, plan: Plan) -> Group:
    """Return a group whose layers select by themselves, however many there are."""
    return replace(group, settings={**(EACH_BY_ITSELF if _may_span(group, plan) else {}), **group.settings})


def _joined(groups: Sequence[Group], plan: Plan) -> Iterator[Group]:
    """Join the layers of groups that are alike, up to the limit."""
    if len(groups) == 1:
        yield groups[0]
        return
    limit = max(codecs.get(groups[0].codec).about.defaults.group_bytes or 0, GPU_GROUP_BYTES)
    layers = [(layer, group) for group in groups for layer in plan.members(group)]
    for run in segments(layers, lambda pair: 4 * pair[0].numel, limit):
        names, group = tuple(layer.name for layer, _ in run), run[0][1]
        yield replace(_settled(group, plan) if len(run) > 1 else group, name=group_name(names), layers=names)
