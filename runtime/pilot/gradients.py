"""How the ranks of a training exchange gradients, which a pilot changes from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from gradlab.ddp.groups import Ranks, destroy, group_like
from gradlab.ddp.model import require_ddp, synchronised_layers, without_compile
from gradlab.ddp.sharded_units import (
    attached_hooks,
    group_of_all,
    hooks_of,
    layers_of_units,
    let_go_of_gathered,
    replicas_of,
    set_hooks,
    shard_group,
    units_of,
)
from gradlab.ddp.switch import switched
from gradlab.ddp.topology import NODE, find_grid, find_topology
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.runtime.attach import compression_hook
from gradlab.runtime.checks import check_ddp
from gradlab.runtime.fsdp.state import column_of, compress_fsdp
from gradlab.runtime.outer.step import OuterStep
from gradlab.runtime.state import CompressionState

CALLER = "Pilot"  # named at the front of errors


class Gradients:
    """The exchange of one model.

    layers: layers that it averages.
    names: names of these by the model's parameters.
    count: ranks, or nodes, that a plan runs between; known from `begin` on.
    alone: whether a rank has to compute its messages alone.
    group_bytes: most bytes of a group of the control; None: as usual.
    """

    model: Any
    layers: tuple[Layer, ...]
    names: dict[torch.Tensor, str]
    count: int
    ranks: Ranks
    alone = False
    group_bytes: float | None = None
    _group: dist.ProcessGroup | None = None  # made for the pilot

    def settle(self) -> None:
        """Have a sharded model show its shards, as a forward pass leaves some units gathered."""
        let_go_of_gathered(self.model)

    def end(self) -> None:
        """Give the exchange back."""
        destroy(self._group)


class DDPGradients(Gradients):
    """DDP's average, by the switch in its hook."""

    def __init__(self, model: object, options: dict[str, Any]) -> None:
        self.model, self._options = require_ddp(model, CALLER), options
        self.layers = tuple(layer for layer, _ in synchronised_layers(self.model))
        self.names = {one: layer.name for layer, one in synchronised_layers(self.model)}
        self._device = next(self.model.parameters()).device

    def begin(self) -> None:
        """Look at the ranks, and take over the exchange, which stays what it was. A collective."""
        check_ddp(self.model, None, None)
        self._switch = switched(self.model)
        group = self.model.process_group
        self.ranks = Ranks(group, self._device)
        topology = find_topology(self._options.get("within", NODE), group, self._device)
        self.count = group.size() if topology is None else len(topology.nodes)

    @contextmanager
    def under(self, plan: Plan | None, **options: Any) -> Iterator[None]:
        """Exchange by a plan for a while, or exactly for None."""
        if plan is None:
            yield
            return
        try:
            with CompressionState(plan, self.model, **{**options, **self._options}) as state:
                self._switch.given = state, compression_hook
                yield
        finally:
            self._switch.given = None


class FSDPGradients(Gradients):
    """FSDP2's reduce-scatter inside a node, and the all-reduce between nodes where there is one.

    Exact is what FSDP does alone; with `between`, a plan of no groups, which is native HSDP bit for bit.
    """

    def __init__(self, model: object, options: dict[str, Any]) -> None:
        units = units_of(model, CALLER)
        self.model, self.layers = without_compile(model), layers_of_units(model)
        self.names = {shard.parameter: shard.layer.name for unit in units for shard in unit.shards}
        between = replicas_of(units, options.get("between"), CALLER)
        self._options, self._units, self._device = {**options, "between": between}, units, units[0].device
        self.alone = between is None  # the plan is that of the reduce-scatter

    def begin(self) -> None:
        """Look at the ranks. A collective."""
        if hooked := attached_hooks(self._units):
            raise GradlabError(f"{CALLER}: {hooked[0]} is compressed already: let a pilot try plans before that")
        row, between = shard_group(self._units, CALLER), self._options.get("between")
        column = column_of(between, self._options.get("within"), row, self._device)
        grid = find_grid(row, column, self._device)
        self._group = group_of_all(self._units, row, column, grid.nodes)
        self.ranks = Ranks(self._group, self._device)
        self.count = row.size() if between is None else len(grid.nodes)
        self._hooks = hooks_of(self.model)

    @contextmanager
    def under(self, plan: Plan | None, **options: Any) -> Iterator[None]:
        """Exchange by a plan for a while, or exactly for None."""
        try:
            with self._state(plan, options):
                yield
        finally:
            for hooks in self._hooks:
                set_hooks(*hooks)

    def _state(self, plan: Plan | None, options: dict[str, Any]) -> AbstractContextManager[Any]:
        chosen = {**options, **self._options}
        if plan is not None:
            return compress_fsdp(self.model, plan, **chosen)
        if chosen.get("between") is None:
            return nullcontext()
        chosen = {name: value for name, value in chosen.items() if name not in ("within", "inside")}
        return compress_fsdp(self.model, Plan(self.layers), **chosen)


class OuterGradients(Gradients):
    """An outer step's exchange of pseudo-gradients. Exact is a plan of no groups."""

    group_bytes = 1.0  # a layer each: fragments cut no group

    def __init__(self, model: object, outer: OuterStep, options: dict[str, Any]) -> None:
        inner = without_compile(model)
        if not isinstance(inner, torch.nn.Module):
            raise GradlabError(f"{CALLER}: the model is a {type(model).__name__}, expected the one of the outer step")
        self.model, self.layers, self._outer, self._options = inner, outer.plan.layers, outer, options
        self.names = outer.names
        self.count, self._device = outer.workers.count, next(inner.parameters()).device

    def begin(self) -> None:
        """Make a group for the plans. A collective."""
        self._outer.wait()
        self.ranks = Ranks(self._outer.workers.agreeing[0], self._device)
        between = self._outer.workers.between
        self._group = None if between is None else group_like(between, None, self._device)

    def under(self, plan: Plan | None, **options: Any) -> AbstractContextManager[None]:
        """Exchange by a plan for a while, or exactly for None."""
        chosen = {name: value for name, value in options.items() if name not in ("optimizer", "scaler")}
        chosen |= self._options
        return self._outer.exchanging_by(Plan(self.layers) if plan is None else plan, self._group, **chosen)
