"""Put a run together from checked arguments: communicators, the rank's run of the plan, and its driver."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from gradlab.ddp.groups import part_of
from gradlab.ddp.optimizers import HeldLayers
from gradlab.ddp.topology import Topology
from gradlab.executor import PlanRun, RunSettings
from gradlab.executor.ownership import share_out
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import compressed_layers
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import StepDriver
from gradlab.runtime.engine.options import RunOptions, Surroundings
from gradlab.runtime.network.communicator import Communicator
from gradlab.runtime.timeline import Timeline
from gradlab.workspace import RecyclingWorkspace


def make_driver(
    plan: Plan,
    group: dist.ProcessGroup,
    surroundings: Surroundings,
    options: RunOptions,
    device: HostDevice,
    *,
    owned: bool,
    topology: Topology | None = None,
) -> StepDriver:
    """Make the driver of a plan's steps, with nodes' ranks averaged first if there is a topology.

    A collective on the group, if nodes have groups of their own.
    """
    workspace, communicator = _memory_and_communicator(options, device)
    settings = _settings(plan, surroundings, options, device)
    everyone = communicator(group, options.deterministic, owned=owned)
    if topology is None:
        if everyone.world_size == 1:
            warnings.warn("gradlab: world size 1, there is no communication to compress", stacklevel=4)
        run = PlanRun(plan, everyone.rank, everyone.world_size, settings, workspace=workspace)
        return StepDriver(run, everyone, surroundings, workspace, options)
    inside, between = (
        communicator(part_of((group,), ranks, None, device.device), options.deterministic, owned=True)
        for ranks in (topology.inside, topology.between)
    )
    averaging = inside
    if device.shares_stream:
        averaging = communicator(part_of((group,), topology.inside, None, device.device), owned=True)
    ownership = share_out(plan, topology.local_ranks)
    mine = ownership.owned(topology.local_rank)
    codecs = {one.name: plan.build(one).to(device.device) for one in plan.compressed_groups if one.name in mine}
    run = PlanRun(plan, topology.node, len(topology.nodes), settings, codecs=codecs, workspace=workspace)
    from gradlab.runtime.engine.nodes import NodeDriver, NodeNetwork

    nodes = NodeNetwork(ownership, inside, averaging, everyone)
    return NodeDriver(run, between, surroundings, workspace, options, nodes)


def make_shard_driver(
    plan: Plan,
    mesh: tuple[dist.ProcessGroup, dist.ProcessGroup],
    topology: Topology,
    surroundings: Surroundings,
    options: RunOptions,
    device: HostDevice,
    timeout: timedelta | None,
) -> StepDriver:
    """Make the driver of a plan of this rank's shards, between the ranks that hold the same ones (its mesh column)."""
    workspace, communicator = _memory_and_communicator(options, device)
    everyone, inside, between = (
        communicator(part_of(mesh, ranks, timeout, device.device), options.deterministic, owned=True, averages=True)
        for ranks in ([rank for node in topology.nodes for rank in node], topology.inside, topology.between)
    )
    run = PlanRun(
        plan, topology.node, len(topology.nodes), _settings(plan, surroundings, options, device), workspace=workspace
    )
    return StepDriver(run, between, surroundings, workspace, options, everyone, inside)


def _memory_and_communicator(
    options: RunOptions, device: HostDevice
) -> tuple[RecyclingWorkspace, Callable[..., Communicator]]:
    """The memory of a run, and what makes its communicators."""
    workspace = RecyclingWorkspace()
    return workspace, partial(
        Communicator,
        check_requests=options.check_requests,
        timeline=Timeline(options.trace_steps),
        workspace=workspace,
        device=device.device,
    )


def _settings(plan: Plan, surroundings: Surroundings, options: RunOptions, device: HostDevice) -> RunSettings:
    plain = surroundings.held.plain_sgd(compressed_layers(plan))
    graphs = None
    if options.cuda_graphs and device.device.type == "cuda":
        from gradlab.executor.device_graphs import CudaGraphs

        graphs = CudaGraphs(device.device)
    return RunSettings(plain, options.hold_unused, replan_beside=True, device=device.device, graphs=graphs)


class _Values(Mapping[str, torch.Tensor]):
    """The values of parameters as they are when they are asked for, by layer name.

    A tensor that was detached once would go on in the old memory after `Module.to` or `parameter.data = ...`.
    """

    def __init__(self, read: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def surroundings_of(
    parameters: Mapping[str, torch.Tensor],
    options: RunOptions,
    values: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> Surroundings:
    """Say where a run reads learning rates, loss scale and parameters; `values` gives what a rank holds (None: all)."""
    scaler = options.scaler
    known = {parameter: name for name, parameter in parameters.items()}
    return Surroundings(
        HeldLayers(options.optimizer, known),
        lambda: scaler.get_scale() if scaler else 1.0,
        _Values({name: one.detach for name, one in parameters.items()} if values is None else values),
    )
