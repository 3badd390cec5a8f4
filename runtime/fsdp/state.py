"""A plan at work under FSDP2: shards of gradients that a node has summed are exchanged between nodes, compressed."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd import Variable

from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.shards import shard_plan
from gradlab.runtime import checkpoint
from gradlab.runtime import run_report as reporting
from gradlab.runtime.checks import agree_on_mesh, check, check_timeout, given_plan
from gradlab.runtime.engine.assembly import make_shard_driver
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import Part
from gradlab.runtime.engine.options import RunOptions
from gradlab.runtime.exchange import Exchange, Result, surroundings_of
from gradlab.runtime.fsdp.units import Unit, attached_hooks, layers_of_units, set_hook, shard_group, units_of
from gradlab.runtime.network.topology import find_grid, group_along

Mesh = dist.DeviceMesh | dist.ProcessGroup
Own = TypeVar("Own", bound="FSDPCompression")


class FSDPCompression(Exchange):
    """An `Exchange` that FSDP2's all-reduce hooks feed, one unit's shards at a time, within backward.

    Make it by `gradlab.runtime.compress_fsdp`, and close it when training ends: after that backward is refused, as
    nodes would drift apart.

    Attributes:
        plan: as it was given, of whole layers. `run.plan` is that of the shards.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        model: object,
        *,
        between: Mesh,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        caller = "compress_fsdp"
        units = units_of(model, caller)
        row, column = shard_group(units, caller), group_along(between, "between")
        if column is None:
            raise GradlabError(f"{caller}: between is a process group that this rank is not in")
        device = units[0].device
        topology = find_grid(row, column, device)
        chosen = RunOptions(**options)
        whole = [(shard.layer, shard.parameter) for unit in units for shard in unit.shards]
        local = {shard.layer.name: shard for unit in units for shard in unit.shards}
        plans: list[Plan] = []  # as it was given, and of the shards

        def attempt() -> None:
            plans.append(given_plan(plan, caller))
            order = {layer.name: position for position, layer in enumerate(layers_of_units(model))}
            pairs = sorted(whole, key=lambda pair: order[pair[0].name])
            check(plans[0], pairs, len(topology.nodes), chosen)
            check_timeout(timeout)
            if len(topology.nodes) == 1:
                raise GradlabError(
                    f"{caller}: between has one rank, so that there is nothing to compress between nodes"
                )
            if hooked := attached_hooks(units):
                raise GradlabError(f"{caller}: {hooked[0]} has an all-reduce hook already, and FSDP takes one")
            names = {shard.layer.name: unit.name for unit in units for shard in unit.shards}
            plans.append(shard_plan(plans[0], {name: shard.shape for name, shard in local.items()}, names))

        def same() -> dict[str, Any]:
            return {"the plan (sha256)": plans[0].digest, **chosen.same_everywhere()}

        agree_on_mesh((row, column), device, attempt, same)
        whole_plan, of_shards = plans
        self._units = units
        self._shards = local
        self._stream: Any = None
        pairs = [(layer, local[layer.name].values()) for layer in of_shards.layers]
        host = HostDevice(device)
        around = surroundings_of(pairs, chosen, {shard.parameter: name for name, shard in local.items()})
        make = partial(make_shard_driver, of_shards, (row, column), topology, around, chosen, host, timeout)
        self._set_up(of_shards, pairs, chosen, host, make)
        self.plan = whole_plan
        self._topology = topology
        self._finalizer = weakref.finalize(self, self._driver.close)
        for unit in units:
            set_hook(unit, partial(_hook, weakref.ref(self), unit))

    # --- steps ---

    def take(self, unit: Unit, flat: torch.Tensor) -> None:
        """Exchange one unit's shards of the gradient between nodes, in place. FSDP's hook calls this.

        Args:
            unit: of the model.
            flat: the unit's gradient, (elements,), as the node's ranks have reduced it.

        Raises:
            GradlabError: if it is not of all trainable parameters of the unit, or comes twice in one backward pass.
        """

        def take() -> None:
            if self._driver.current is None:
                self._communicator.timeline.begin(self.iteration)
                self._driver.begin()
                self._stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
                # FSDP's own callback was queued by the first unit's backward: this one runs after it.
                Variable._execution_engine.queue_callback(self._end_step)
            current = self._driver.current
            assert current is not None
            gradients = unit.gradients(flat)
            if again := sorted(gradients.keys() & current.step.gradients.keys()):
                raise GradlabError(
                    f"{again[0]}: a second gradient within one backward pass; accumulate with "
                    "model.set_requires_gradient_sync(False)"
                )
            self._driver.add(Part(len(current.parts), gradients, flat))
            self._driver.drain()

        super()._guarded(take)

    def _end_step(self) -> None:
        """End the step after backward: commit it, or fill all gradients with NaN, so that a loss scaler skips it."""

        def end() -> None:
            current = self._driver.current
            assert current is not None
            absent = [name for name in self._shards if name not in current.step.gradients]
            if zeros := current.step.leave_out(absent):
                self._driver.add(Part(len(current.parts), zeros))
                self._driver.drain()
            record = self._driver.finish()
            if not record.finite:
                for shard in self._shards.values():
                    shard.fill_gradient(torch.nan)

        with _on(self._stream):
            super()._guarded(end)
        if self._stream is not None:
            torch.cuda.current_stream(self._device.device).wait_stream(self._stream)

    def _guarded(self, work: Callable[[], Result]) -> Result:
        """Refuse `begin`, `add`, `finish` and `step`: FSDP's hooks drive the steps."""
        raise GradlabError("this exchange is fed by FSDP's hooks; use Exchange to hand over gradients yourself")

    # --- what it holds ---

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], residuals: str) -> None:
        """Continue the run of other nodes that have as many shards each; see `Exchange.load_state_dicts`.

        Args:
            states: the state dicts of all old ranks, in rank order.
            residuals: "split", "sum" or "drop".

        Raises:
            GradlabError: as there, and for another number of shards.
        """
        self._require_between_steps()
        assert self._topology is not None
        checkpoint.redistribute_shards(self.run, states, self._identity(), residuals, self._device)
        self._driver.ranks_compared = False

    def _identity(self) -> dict[str, Any]:
        identity = super()._identity()
        return {**identity, "shards": identity.pop("local_ranks")}

    def _place(self) -> reporting.Place:
        everyone, topology = self._driver.everyone, self._topology
        assert topology is not None
        dense = sum(shard.nbytes for shard in self._shards.values())
        grouped = {layer for group in self.run.plan.compressed_groups for layer in group.layers}
        whole = [unit for unit in self._units if grouped.isdisjoint(shard.layer.name for shard in unit.shards)]
        # A unit without a compressed layer is averaged as it lies, padding included.
        forecast = self.run.plan.payload_bytes(len(topology.nodes)) + sum(unit.padding for unit in whole)
        where = reporting.NodePlace(topology.node, len(topology.nodes), topology.local_rank, topology.local_ranks)
        return reporting.Place(everyone.rank, everyone.world_size, dense, forecast, where)


def compress_fsdp(
    model: object,
    plan: Plan | str | os.PathLike[str],
    *,
    between: Mesh,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: Any = None,
    **options: Any,
) -> FSDPCompression:
    """Compress what FSDP2's nodes exchange: the all-reduce between ranks that hold the same shards.

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        state = compress_fsdp(model, "plan.safetensors", between=mesh["replicate"], optimizer=optimizer)

    Shard along one dimension, inside a node: under native HSDP (a mesh of two dimensions for `fully_shard`) FSDP has
    averaged the gradients before any hook sees them. Gradients are summed inside the node by FSDP's reduce-scatter.
    Then every rank runs the plan on its shards, with the ranks of other nodes that hold the same ones. With a plan that
    compresses nothing the result is native HSDP's, bit for bit in float32 and bfloat16.

    All ranks call it together, after the model is materialized, sharded and has its optimizer.

    Args:
        model: that `fully_shard` was called on, itself and its blocks.
        plan: for the model's whole layers, such as one fitted on a DDP recording; or the path of an artifact. A codec
            sees the rows of each layer that the rank holds.
        between: the mesh's dimension along which ranks hold the same shards, or that process group.
        optimizer: what the model is trained with; see `Exchange`.
        scaler: the loss scaler, if one is in use.
        options: timeout, and those of `Exchange` except hold_unused.

    Returns:
        The state, attached. Close it, or use it as a context manager, when training ends.

    Raises:
        GradlabError: for a model that is not under FSDP2 along one dimension, or has a hook; for a mesh that does not
            fit; for a plan of another model, or whose codecs need whole layers. See `Exchange`.
    """
    return FSDPCompression(plan, model, between=between, optimizer=optimizer, scaler=scaler, **options)


def _hook(state: weakref.ref[FSDPCompression], unit: Unit, flat: torch.Tensor) -> None:
    alive = state()
    if alive is None:
        raise GradlabError("the compression of this FSDP model was dropped; keep what compress_fsdp returned")
    alive.take(unit, flat)


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
