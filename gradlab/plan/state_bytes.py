"""The memory that a plan's codecs and wrappers take on a rank between iterations, counted before there is a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from gradlab import wrappers
from gradlab.codec.settings import fields_of
from gradlab.codec.wrapper import kept_bytes
from gradlab.plan.plan import Plan, Wrap, between


def state_bytes(plan: Plan, world_size: int, rank: int = 0, *, groups: Collection[str] | None = None) -> dict[str, int]:
    """Count the bytes of state that a rank keeps in most iterations of a run, for float32 gradients.

    A codec that learns holds more while it does. A basis of GradiVeQ counts as if no axis were left out.

    >>> from gradlab.plan import state_bytes
    >>> state_bytes(Plan.uniform([Layer("w", (1000, 100))], "powersgd", rank=2), world_size=4)
    {'residual': 400000, 'q': 800}

    Args:
        plan: any plan; of FSDP2's shards, one that `gradlab.plan.shards.shard_plan` cut.
        world_size: number of ranks N that exchange.
        rank: rank whose state it is.
        groups: names of the groups whose state the rank keeps. None: all.

    Returns:
        Bytes by the entry's name, such as "residual", the largest first.
    """
    plan, found = between(plan, world_size), Counter[str]()
    for group in plan.compressed_groups:
        if groups is None or group.name in groups:
            found.update(kept_bytes(plan._built[group.name], plan.members(group), rank, world_size, group.name))
    return dict(found.most_common())


def with_buffers(plan: Plan, kind: str) -> Plan:
    """Return a plan whose wrappers keep residuals and velocities in a format, where a wrapper has that setting.

    kind: a wrapper's `buffer`, such as "bfloat16".
    """

    def kept(wrap: Wrap) -> Wrap:
        names = {field.name for field in fields_of(wrappers.get(wrap.name).Settings)}
        return Wrap(wrap.name, {**wrap.settings, "buffer": kind}) if "buffer" in names else wrap

    groups = (replace(group, wrappers=tuple(map(kept, group.wrappers))) for group in plan.groups)
    return replace(plan, groups=tuple(groups))
