"""The plans of an FSDP2 model, between nodes and inside them: given for whole layers, run on shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradlab.ddp.sharded_units import Unit
from gradlab.ddp.topology import Topology
from gradlab.executor.reduce_scatter import check_alone
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.plan.shards import shard_plan
from gradlab.runtime.checks import check
from gradlab.runtime.engine.options import RunOptions


@dataclass(frozen=True)
class Levels:
    """Runs between nodes and inside them.

    whole: the plan between nodes as it was given, of whole layers.
    shards: the same of this rank's shards.
    inside: the plan of the reduce-scatters, of whole layers; None where they are not compressed.
    inside_shards: the same of the padded shards.
    """

    whole: Plan
    shards: Plan
    inside: Plan | None = None
    inside_shards: Plan | None = None

    @property
    def digests(self) -> dict[str, str]:
        """Values that all ranks have to have in common."""
        between = {"the plan (sha256)": self.whole.digest}
        return between if self.inside is None else {**between, "the plan inside nodes (sha256)": self.inside.digest}


class HeldShards:
    """All shards that a rank holds, by layer in the model's order; `layers` are the whole ones."""

    def __init__(self, units: Sequence[Unit], layers: Sequence[Layer]) -> None:
        held = {shard.layer.name: (unit.name, shard) for unit in units for shard in unit.shards}
        self.by_name = {layer.name: held[layer.name][1] for layer in layers if layer.name in held}
        self.layers = tuple(shard.layer for shard in self.by_name.values())
        self._unit_of = {name: unit for name, (unit, _) in held.items()}

    def levels(self, plan: Plan, inside: Plan | None, topology: Topology, options: RunOptions) -> Levels:
        """Check plans of whole layers, and cut them for the shards; refuse those that cannot run on shards."""
        pairs = [(shard.layer, shard.parameter) for shard in self.by_name.values()]
        check(plan, pairs, len(topology.nodes), options)
        shards = shard_plan(plan, {name: shard.shape for name, shard in self.by_name.items()}, self._unit_of)
        if inside is None:
            return Levels(plan, shards)
        check(inside, pairs, topology.local_ranks, options)
        check_alone(inside)
        padded = {name: shard.padded_shape for name, shard in self.by_name.items()}
        return Levels(plan, shards, inside, shard_plan(inside, padded, self._unit_of))
