"""Sources of a recorder's gradients: DDP's buckets, or shards under FSDP2; of every rank, or the means of nodes.

Means of nodes are what travels between nodes in hierarchical training. The ranks of a node send theirs to the node's
first rank, which writes them: ranks of the trace are nodes then.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.collectives import mean_of_node
from gradlab.ddp.averaged import AveragedLayers, not_averaged
from gradlab.ddp.bucket_layouts import BucketLayouts, OldGradient
from gradlab.ddp.groups import Ranks, part_of
from gradlab.ddp.model import bare_module, synchronised_layers
from gradlab.ddp.sharded_units import (
    HOW_TO,
    SHARDED,
    Unit,
    attached_hooks,
    averaged_units,
    group_of_all,
    other_parts,
    replicas_of,
    shard_group,
    units_of,
)
from gradlab.ddp.switch import PlainAverage, attached_hook
from gradlab.ddp.topology import Topology, find_grid, find_topology, group_along
from gradlab.errors import GradlabError
from gradlab.layout import Layer, named_layers

Pairs = list[tuple[Layer, nn.Parameter]]
Gradient = tuple[torch.Tensor, torch.Tensor, bool]  # parameter, gradient, and whether no rank used the parameter


class BucketSource:
    """DDP's buckets.

    topology: the nodes whose means are recorded, as `within` tells them; None: every rank's own gradients are.
    writes: whether this rank writes gradients.
    """

    def __init__(self, model: DistributedDataParallel, within: object) -> None:
        # DDP holds its hook's state where the garbage collector does not see it: a recorder must not hold the model.
        self._model = weakref.ref(model)
        device = next(model.parameters()).device
        self.ranks = Ranks(model.process_group, device)
        self._averaged, self._layouts = AveragedLayers(model), BucketLayouts(model, rearrange=False)
        self.average = PlainAverage(model)
        self._unread = ""  # why steps are lost, if DDP hands over what cannot be recorded
        self.topology: Topology | None = None
        if within is not None:
            self.topology = find_topology(within, model.process_group, device)
            if self.topology is None:
                raise GradlabError(
                    f"within = {within!r}: no nodes of several ranks beside others; leave it out to record every rank"
                )
            self._node = part_of((model.process_group,), self.topology.inside, None, device)
        self.writes = self.topology is None or self.topology.local_rank == 0

    @property
    def model(self) -> DistributedDataParallel:
        """The model in DDP. Its user keeps it."""
        model = self._model()
        assert model is not None
        return model

    @property
    def pairs(self) -> Pairs:
        """The layers that ranks average, with their parameters."""
        return synchronised_layers(self.model)

    def check(self) -> None:
        """Refuse a model that a recorder cannot observe."""
        if name := attached_hook(self.model):
            raise GradlabError(
                f"the DDP model has the communication hook {name} already, and DDP takes one only; "
                "make a new DDP model without it (with a framework, a new Trainer, and no hook in its options), and "
                "give the recorder that hook as wrap=(state, hook)"
            )
        if getattr(self.model, "_use_python_reducer", False):
            raise GradlabError("recording needs DDP's own reducer; switch compiled autograd's DDP mode off")

    def require_averaged(self, chosen: Sequence[tuple[Layer, nn.Parameter]]) -> None:
        """Refuse layers that DDP does not average."""
        self._averaged.require(chosen)

    def unaveraged(self, closing: bool = False) -> str:
        """Say which trained layers ranks do not average, see `AveragedLayers.look`, or why steps are lost; or ""."""
        missing = self._averaged.missing() if closing else self._averaged.look()
        return not_averaged(missing) if missing else self._unread

    def thawed(self, closing: bool = False) -> list[Layer]:
        """List the layers that ranks average, trained now and frozen at the start; see `AveragedLayers.look`."""
        return self._averaged.thawed() if closing or self._averaged.looks else []

    def metadata(self) -> dict[str, Any]:
        """The manifest's entries on the way of training."""
        options = {name: getattr(self.model, name) for name in ("find_unused_parameters", "static_graph")}
        return {**options, **_nodes(self.topology)}

    def gradients(self, bucket: dist.GradBucket) -> list[Gradient]:
        """List what a bucket brings to the trace before it is averaged; None on a rank that another one writes for.

        A collective of the node's ranks, where means of nodes are recorded.
        """
        whole = bucket.buffer()
        try:
            pairs = [(bucket.parameters()[0], whole.to_dense())] if whole.is_sparse else self._layouts.gradients(bucket)
        except OldGradient as error:  # on all ranks alike; the step is lost
            self._unread = str(error)
            return []
        # DDP fills the place of a parameter that the loss does not depend on with zeros.
        unused = [parameter.grad is None for parameter, _ in pairs]
        if self.topology is None:
            return [(*pair, absent) for pair, absent in zip(pairs, unused, strict=True)]
        flat = torch.cat([*(gradient.reshape(-1) for _, gradient in pairs), pairs[0][1].new_tensor(unused)])
        gathered = _to_first(flat, self._node, self.topology.inside[0])
        if gathered is None:
            return []
        sizes = [gradient.numel() for _, gradient in pairs]
        *means, _ = mean_of_node(gathered).split([*sizes, len(pairs)])
        by_all = torch.stack([one[-len(pairs) :] for one in gathered]).bool().all(0).tolist()
        return [
            (parameter, mean.view(gradient.shape), absent)
            for (parameter, gradient), mean, absent in zip(pairs, means, by_all, strict=True)
        ]


class ShardSource:
    """Shards of gradients under FSDP2, as the node's ranks have reduced them, of each part that tensor parallelism has
    cut. `between` joins ranks of the same; writes: see `BucketSource`."""

    def __init__(self, model: nn.Module, between: object) -> None:
        caller = "TraceRecorder"
        self.model = model
        self.units = units_of(model, caller)
        self._averaged = averaged_units(model, self.units)
        device, self._row = self.units[0].device, shard_group(self.units, caller)
        between = replicas_of(self.units, between, caller)
        if between is None:
            raise GradlabError(
                f"{caller}: the model is in FSDP2 (fully_shard); give between=mesh['replicate']: {HOW_TO}"
            )
        column = group_along(between, "between")
        if column is None:
            raise GradlabError(f"{caller}: between is a process group that this rank is not in")
        self._column = column
        self.topology = find_grid(self._row, column, device)
        self._parts = other_parts(self.units)
        self.writes = self.topology.local_rank == 0 and (self._parts is None or self._parts.rank() == 0)
        self.ranks = Ranks(group_of_all(self.units, self._row, column, self.topology.nodes), device)

    @property
    def pairs(self) -> Pairs:
        """The whole layers, with the parameters that hold this rank's shards."""
        return named_layers(self.model)

    def check(self) -> None:
        """Refuse a model that a recorder cannot observe."""
        if hooked := attached_hooks(self.units):
            raise GradlabError(f"TraceRecorder: {hooked[0]} has an all-reduce hook already, and FSDP takes one")
        parts = 1 if self._parts is None else self._parts.size()
        for one in (shard for unit in self.units for shard in unit.shards):
            if one.cut is not None and one.layer.shape[one.cut] % parts:
                raise GradlabError(
                    f"TraceRecorder: {one.layer.name} of {one.layer.shape} is cut into {parts} unequal parts"
                )

    def metadata(self) -> dict[str, Any]:
        """The manifest's entries on the way of training."""
        return {"fully_shard": True, **_nodes(self.topology)}

    def require_averaged(self, chosen: Sequence[tuple[Layer, nn.Parameter]]) -> None:
        """Do nothing: `units_of` has refused layers of no unit."""

    def unaveraged(self, closing: bool = False) -> str:
        """Do as `BucketSource.unaveraged`."""
        missing = self._averaged.missing() if closing else self._averaged.look()
        return not_averaged(missing, *SHARDED) if missing else ""

    def thawed(self, closing: bool = False) -> list[Layer]:
        """Return none: a unit refuses layers that are thawed."""
        return []

    def gradients(self, unit: Unit, flat: torch.Tensor) -> list[Gradient]:
        """Put a unit's gradients together from shards (elements,), averaged over the node and not yet between nodes.

        A collective of the ranks that hold shards of the unit on the node. None on a rank that another one writes for.
        """
        before, _ = unit.scales(flat.dtype, len(self.topology.nodes))
        gathered = _to_first(flat if before == 1 else flat / before, self._row, self.topology.inside[0])
        parts = None if gathered is None else [torch.stack(gathered)]
        if parts is not None and self._parts is not None:
            parts = _to_first(parts[0], self._parts, dist.get_process_group_ranks(self._parts)[0])
        if parts is None:
            return []
        by_part = [[unit.padded_gradients(shards) for shards in of_part] for of_part in parts]
        present = [shard for shard in unit.shards if shard.layer.name in by_part[0][0]]
        return [
            (one.parameter, one.join([[shards[one.layer.name] for shards in of_part] for of_part in by_part]), False)
            for one in present
        ]

    def average(self, unit: Unit, flat: torch.Tensor) -> None:
        """Average a unit's shards between nodes in place, as native HSDP does; sum them where that sums."""
        op = dist.ReduceOp.AVG if unit.divisor is None else dist.ReduceOp.SUM
        dist.all_reduce(flat, op=op, group=self._column)


Source = BucketSource | ShardSource


def trace_rank(source: Source) -> int | None:
    """The rank of the trace that this process writes; None: another one of its node does."""
    if not source.writes:
        return None
    return source.ranks.rank if source.topology is None else source.topology.node


def trace_ranks(source: Source) -> int:
    """The number of ranks that the trace has."""
    return source.ranks.size if source.topology is None else len(source.topology.nodes)


def model_of(source: Source) -> nn.Module:
    """The user's own module."""
    return bare_module(source.model)


def _nodes(topology: Topology | None) -> dict[str, Any]:
    return {} if topology is None else {"averaged_ranks": topology.local_ranks}


def _to_first(flat: torch.Tensor, group: dist.ProcessGroup, first: int) -> list[torch.Tensor] | None:
    """Send a tensor to a group's first rank (its global number), which gets those of all."""
    parts = [torch.empty_like(flat) for _ in range(group.size())] if dist.get_rank() == first else None
    dist.gather(flat.contiguous(), parts, dst=first, group=group)
    return parts
