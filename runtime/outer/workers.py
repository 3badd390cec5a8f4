"""The parameters that a worker trains, and the ranks that it exchanges them with."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.averaged import not_averaged
from gradlab.ddp.groups import Ranks, destroy, group_like, group_or_world, part_of
from gradlab.ddp.model import without_compile
from gradlab.ddp.sharded_units import let_go_of_gathered
from gradlab.ddp.topology import find_topology
from gradlab.errors import GradlabError
from gradlab.layout import Layer, bare_names, named_layers
from gradlab.plan import Plan
from gradlab.plan.shards import shard_plan

CALLER = "OuterStep"  # named at the front of errors


@dataclass(frozen=True)
class Held:
    """One layer as this rank holds it: `parameter` is all of `layer` or a shard, and `shape` is of that part."""

    layer: Layer
    parameter: nn.Parameter
    shape: torch.Size
    device: torch.device

    @property
    def values(self) -> torch.Tensor:
        """This rank's part as it is now, `shape`: `Module.to` and `parameter.data = ...` give it another memory."""
        return local_part(self.parameter)

    def is_held_by(self, now: torch.Tensor | None) -> bool:
        """Whether the model's parameter of this name still is this one, of the same shape and device. FSDP2 shows a
        gathered parameter in place of its shards where a module stays gathered."""
        gathered = isinstance(self.parameter, DTensor) and now is not None and not isinstance(now, DTensor)
        same = self.values.shape == self.shape and self.values.device == self.device
        return same and (now is self.parameter or gathered)


class WorkerLayers:
    """This rank's parts of a model's trainable layers, in registration order. It does not keep the model alive.

    A model is plain, in DDP, or sharded by FSDP2 along one dimension of a mesh.
    """

    def __init__(self, model: object) -> None:
        inner = without_compile(model)
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner
        if not isinstance(inner, nn.Module):
            raise GradlabError(f"{CALLER}: the model is a {type(model).__name__}, expected a torch.nn.Module")
        self._model = weakref.ref(inner)
        let_go_of_gathered(inner)
        self.by_name = {layer.name: _held(layer, parameter) for layer, parameter in named_layers(inner)}
        if not self.by_name:
            raise GradlabError(f"{CALLER}: the model has no trainable parameters")
        self.device = next(iter(self.by_name.values())).values.device

    @property
    def sharded(self) -> bool:
        """Whether a worker's ranks each hold a part of its parameters."""
        return any(one.shape != one.layer.shape for one in self.by_name.values())

    def beside(self) -> dict[str, torch.Tensor]:
        """Return what else the model computes with, by name: frozen parameters and buffers."""
        model = self._model()
        assert model is not None
        trained = {id(one.parameter) for one in self.by_name.values()}
        frozen = {name: one for name, one in model.named_parameters() if id(one) not in trained}
        return {**frozen, **dict(model.named_buffers())}

    def require_same(self) -> None:
        """Refuse a model whose parameters are others than when this was made: workers would drift apart in silence."""
        model = self._model()
        if model is None:
            return
        names, parameters = zip(*model.named_parameters(), strict=True)
        now = dict(zip(bare_names(names), parameters, strict=True))
        changed = [name for name, one in self.by_name.items() if not one.is_held_by(now.get(name))]
        changed += [name for name, one in now.items() if one.requires_grad and name not in self.by_name]
        if changed:
            raise GradlabError(f"{CALLER}: {not_averaged(changed, f'the {CALLER} was made', f'make a new {CALLER}')}")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, as one that shares its memory and takes no gradient."""
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _held(layer: Layer, parameter: nn.Parameter) -> Held:
    if not isinstance(parameter, DTensor):
        return Held(layer, parameter, parameter.shape, parameter.device)
    if parameter.device_mesh.ndim != 1:
        raise GradlabError(
            f"{CALLER}: {layer.name} lies on a mesh of {parameter.device_mesh.ndim} dimensions, expected one, that of "
            "the worker's own ranks"
        )
    local = parameter.to_local()
    return Held(layer, parameter, local.shape, local.device)


def plan_of_rank(plan: Plan, held: WorkerLayers) -> Plan:
    """Return the plan of what this rank holds; of its shards, refuse a codec that needs whole layers."""
    if not held.sharded:
        return plan
    shapes = {layer.name: tuple(held.by_name[layer.name].shape) for layer in plan.layers}
    return shard_plan(plan, shapes, dict.fromkeys(shapes, ""))


class Workers:
    """The ranks of a run by worker: those of one worker train one model together, step by step.

    between: the group in which this rank exchanges with those of its place in other workers; None where another rank of
        its worker does that for it.
    inside: the group of this rank's worker; None if that has one rank.
    sharded: whether each of a worker's ranks holds, and exchanges, a part of its parameters.
    count: number of workers.
    agreeing: the groups of all ranks that are made together.
    identity: what a checkpoint of this rank has to match.
    """

    agreeing: tuple[dist.ProcessGroup, ...]
    between: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None
    count: int
    _made: tuple[dist.ProcessGroup, ...]

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        within: object,
        device: torch.device,
        timeout: timedelta | None,
        sharded: bool,
    ) -> None:
        everyone = group_or_world(group, CALLER)
        self.agreeing, self.sharded, self._device = (everyone,), sharded, device
        topology = find_topology(within, everyone, device)
        if topology is None and sharded:
            raise GradlabError(f"{CALLER}: the model is sharded; say by within= which ranks hold one model")
        if topology is None:
            self.count = everyone.size()
            self.between, self.inside = group_like(everyone, timeout, device), None
            self._made = (self.between,)
        else:
            self.count = len(topology.nodes)
            between = part_of((everyone,), topology.between, timeout, device)
            self.inside = part_of((everyone,), topology.inside, timeout, device)
            # Made by all ranks, as that is a collective; used by those that exchange.
            self.between = between if sharded or topology.local_rank == 0 else None
            self._made = (between, self.inside)

    @property
    def identity(self) -> dict[str, Any]:
        everyone = self.agreeing[0]
        return {"rank": everyone.rank(), "world_size": everyone.size(), "workers": self.count}

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give all workers the first one's tensors, in place. A collective of all ranks."""
        if self.between is not None:
            broadcast(tensors, self.between, self._device)
        self.hand_on(tensors)

    def hand_on(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give a worker's other ranks what its exchanging rank has, in place. A collective of the worker's ranks."""
        if self.inside is not None and not self.sharded:
            broadcast(tensors, self.inside, self._device)

    def all_of(self, flag: bool) -> bool:
        """Whether a flag is set on all of a worker's ranks that exchange. A collective of these."""
        if self.inside is None:
            return flag
        votes = Ranks(self.inside, self._device).gather(flag)
        return all(votes) if self.sharded else bool(votes[0])

    def close(self) -> None:
        """Destroy the groups that were made. Others that wait in one of them get an error."""
        groups, self._made, self.between, self.inside = self._made, (), None, None
        for group in groups:
            destroy(group)


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a group its first one's tensors, in place, whatever their layouts, types and devices are."""
    for tensor in tensors:
        flat = tensor.to(device).contiguous()
        if flat.numel():  # as bytes: backends do not take every type
            dist.broadcast(flat.view(-1).view(torch.uint8), group=group, group_src=0)
        if flat is not tensor and not torch.equal(flat, tensor):  # a buffer that was expanded cannot be written
            tensor.copy_(flat)
