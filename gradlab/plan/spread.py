"""Spread GradiVeQ's refits over iterations, so that no single one of them fits the bases of all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradlab.plan.plan import Plan


def spread_refits(plan: Plan) -> Plan:
    """Delay the cycle of each GradiVeQ group by one iteration more than that of the group before it.

    A group then fits its bases, and samples where it does, in iterations of its own (as many as its cycle has, after
    which groups share them again). Delays are settings, the same on all ranks, and a resumed run keeps them.

    Args:
        plan: any plan.

    Returns:
        The plan, with the setting `delay` of each group of the codec gradiveq: 0, 1, 2, ...
    """
    groups, fitted = [], 0
    for group in plan.groups:
        if group.codec == "gradiveq":
            settings = plan.build(replace(group, wrappers=())).settings
            cycle = settings.compressed_steps + (settings.sample_steps if settings.refresh == "sample" else 0)
            group = replace(group, settings={**group.settings, "delay": fitted % max(1, cycle)})
            fitted += 1
        groups.append(group)
    return replace(plan, groups=tuple(groups))
