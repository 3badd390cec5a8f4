"""The limits of a plan between nodes of several ranks: one rule for recommendations, forecasts and training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradlab.plan.plan import Group, Plan


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
