"""A plan at work under FSDP2: shards of gradients that a node has summed are exchanged between nodes, compressed."""

from __future__ import annotations

import os
import warnings
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import NoneType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradlab.ddp.averaged import not_averaged
from gradlab.ddp.copies import take_away
from gradlab.ddp.groups import part_of
from gradlab.ddp.model import without_compile
from gradlab.ddp.optimizer_steps import at_each_step
from gradlab.ddp.sharded_passes import Passes, require_whole_backward
from gradlab.ddp.sharded_units import (
    HOW_TO,
    SHARDED,
    Shard,
    Unit,
    all_gather_of,
    attached_hooks,
    averaged_units,
    custom_reductions,
    has_hooks,
    layers_of_units,
    leave_averaging,
    other_parts,
    refuse_thawed,
    replicas_of,
    require_native_gathers,
    set_hooks,
    shard_group,
    sharded_modules,
    units_of,
)
from gradlab.ddp.step_clock import moment
from gradlab.ddp.topology import find_grid, group_along
from gradlab.errors import GradlabError
from gradlab.layout import Layer, describe_difference
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import compressed_layers
from gradlab.runtime import checkpoint
from gradlab.runtime.checks import agree_on, check_timeout, given_plan
from gradlab.runtime.engine.device import HostDevice
from gradlab.runtime.engine.driver import Iteration, Part
from gradlab.runtime.engine.optimizer_steps import OptimizerSteps
from gradlab.runtime.engine.options import RunOptions, Surroundings
from gradlab.runtime.exchange import Exchange
from gradlab.runtime.fsdp.parameters import ParameterGathers, parameter_plan
from gradlab.runtime.fsdp.reduction import Levels, ShardReduction, UnitReduceScatter, levels_of, shard_driver
from gradlab.runtime.network.faults import CommunicationError
from gradlab.trial import trial

Mesh = dist.DeviceMesh | dist.ProcessGroup


CALLER = "compress_fsdp"  # named at the front of errors


class FSDPCompression(Exchange):
    """An `Exchange` that FSDP2's all-reduce hooks feed, one unit's shards at a time, within backward.

    Make it by `gradlab.runtime.compress_fsdp`, and close it when training ends: after that backward is refused, as
    nodes would drift apart.

    Attributes:
        plan: plan of whole layers, as it was given. `run.plan` is that of the shards.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        model: object,
        *,
        between: Mesh | None = None,
        within: Mesh | None = None,
        inside: Plan | str | os.PathLike[str] | None = None,
        parameters: Plan | str | os.PathLike[str] | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        running = trial()
        if running is not None:
            plan, inside, options = running.plan, None, running.options(options)
        units = units_of(model, CALLER)
        device, row = units[0].device, shard_group(units, CALLER)
        between = replicas_of(units, between, CALLER)
        column = column_of(between, within, row, device)
        topology = find_grid(row, column, device)
        if between is None and row.size() < dist.get_world_size():
            _warn_of_the_rest(row)
        chosen = RunOptions(**options)
        held = {shard.layer.name: shard for unit in units for shard in unit.shards}
        shards = {layer.name: held[layer.name] for layer in layers_of_units(model)}  # in the model's order

        def attempt() -> Levels:
            check_timeout(timeout)
            _check_hooks(units, within)
            if between is not None and len(topology.nodes) == 1:
                raise GradlabError(f"{CALLER}: between has one rank: there is nothing to compress between nodes")
            first = given_plan(plan, CALLER)
            second = _plan_inside(first, between, within, inside)
            layers = tuple(shard.layer for shard in shards.values())
            whole = first if between is not None else Plan(layers)
            gathers = _plan_of_gathers(units, parameters, layers)
            return replace(levels_of(units, shards, (whole, second), topology, chosen), parameters=gathers)

        levels = agree_on((row, column), device, attempt, lambda found: _same_everywhere(found, chosen))
        self._units, self._shards = units, shards
        self._stream: Any = None
        self._frozen: set[str] = set()  # layers that came as zeros in the step in progress, for their groups
        # Of earlier micro-batches, by unit and elements: reduced inside nodes alone.
        self._sums: dict[tuple[str, int], torch.Tensor] = {}
        held_parameters = {name: shard.parameter for name, shard in shards.items()}
        values = {name: shard.values for name, shard in shards.items()}
        self._around = Surroundings(held_parameters, chosen, HostDevice(device), values)
        driver = shard_driver(units, levels.shards, (row, column), topology, self._around, timeout)
        self._set_up(levels.whole, driver)
        self._parts, self._bad = other_parts(units), torch.zeros((), dtype=torch.bool, device=device)
        self._driver.telling = 0  # backward stands still while a unit's shards travel
        self._follow(model, held_parameters)
        self._finalizer = weakref.finalize(self, self._driver.close)
        self.inside = self._reduction(levels, chosen.measure_every)
        self._row, self.parameters = row, self._gathers(levels.parameters)
        self._attach(model)
        if running is not None:
            running.follow(self, chosen.scaler)

    def _follow(self, model: object, parameters: Mapping[str, torch.Tensor]) -> None:
        """Follow the model's backward passes, and the optimizers' steps, which end a step that has waited for one."""
        self._passes = Passes(model, self._units)
        ending = at_each_step(self._driver.held.holding, self._passes.finish)  # before `OptimizerSteps` sees them
        self._steps = OptimizerSteps(self._driver, parameters)
        self._driver.closing += [self._passes.close, partial(take_away, ending), self._steps.close]

    def _reduction(self, levels: Levels, measure_every: int) -> ShardReduction | None:
        """The reduce-scatters, if they are compressed."""
        if levels.inside is None or levels.inside_shards is None:
            return None
        assert self._driver.beside is not None
        plain = self._around.held.plain_sgd(compressed_layers(levels.inside))
        settings = replace(self.run.settings, plain_sgd=plain)
        made = ShardReduction(levels.inside, levels.inside_shards, self._driver.beside, settings, measure_every)
        for run in made.runs:
            self._steps.follow(run)
        return made

    def _gathers(self, plan: Plan | None) -> ParameterGathers | None:
        """The all-gathers, if they are compressed. They do not keep the state alive, and are exact after it."""
        if plan is None:
            return None
        run = self.run
        gathers = ParameterGathers(plan, self._units, lambda: run.iteration)
        self._driver.closing.append(gathers.close)
        return gathers

    def _attach(self, model: object) -> None:
        """Set the units' hooks. These do not keep the state alive."""
        me, inner = weakref.ref(self), without_compile(model)
        assert isinstance(inner, torch.nn.Module)
        self._model, self._modules = weakref.ref(inner), len(sharded_modules(inner))
        self._hooks: list[tuple[Unit, Any, Any]] = []
        for unit in self._units:
            reduction = None if self.inside is None else UnitReduceScatter(partial(_reduce, me), unit)
            self._hooks.append((unit, partial(_hook, me, unit), reduction))
            set_hooks(unit.module, *self._hooks[-1][1:])
        leave_averaging(self._units)
        self._gathered = [] if self.parameters is None else self.parameters.attach(self._units)
        refuse_thawed(inner, self._units)
        self._averaged = averaged_units(inner, self._units)

    def _require_attached(self) -> None:
        """Refuse what would let nodes drift apart: modules that have other hooks by now, or none."""
        if lost := [unit.title for unit, *hooks in self._hooks if not has_hooks(unit, *hooks)]:
            raise GradlabError(f"{lost[0]} has another hook now than the one that {CALLER} set, and nodes drift apart")
        if lost := [unit.title for unit, gather in self._gathered if all_gather_of(unit) is not gather]:
            raise GradlabError(f"{lost[0]} has another all-gather now than the one that {CALLER} set")
        model = self._model()
        if model is not None and len(sharded_modules(model)) != self._modules:
            raise GradlabError(
                f"fully_shard was called on modules after {CALLER}, and their gradients stay in the node; call it first"
            )
        if missing := self._averaged.look():
            raise GradlabError(f"{CALLER}: {not_averaged(missing, *SHARDED)}")

    # --- steps ---

    def take(self, unit: Unit, flat: torch.Tensor) -> None:
        """Exchange one unit's shards (elements,), reduced by the node, between nodes, in place. FSDP calls this."""
        with super()._guarded(), _waiting(f"the all-reduce of {unit.title} between nodes"):
            unit.require_unchanged()
            if unit.puts_off:
                self._put_off(unit, flat)
                return
            current = self._step_of(unit, flat)
            if (earlier := self._sums.pop((unit.title, flat.numel()), None)) is not None:
                flat.add_(earlier)
            if self._parts is not None:
                self._bad |= ~flat.isfinite().all()
            gradients = unit.gradients(flat)
            frozen = _frozen_beside(unit, gradients, self.run.plan)
            self._frozen |= frozen.keys()
            gradients |= {name: flat.new_zeros(shard.shape) for name, shard in frozen.items()}
            if again := sorted(gradients.keys() & current.step.gradients.keys()):
                raise GradlabError(
                    f"{again[0]}: a second gradient within one backward pass; accumulate with "
                    "model.set_requires_gradient_sync(False)"
                )
            # What the codecs see is the mean, also where FSDP divides by a part of the ranks only afterwards, or sums.
            before, after = unit.scales(flat.dtype, self.run.world_size)
            if before != 1:
                flat.div_(before)
            ready = moment(flat.device) if flat.is_cuda else None
            self._driver.add(Part(len(current.parts), gradients, flat, ready=ready))
            self._driver.drain()
            if after != 1:
                flat.mul_(after)

    def _put_off(self, unit: Unit, flat: torch.Tensor) -> None:
        """Keep a unit's shards (elements,) for the micro-batch after which nodes are averaged."""
        if self.inside is not None:
            raise GradlabError(
                f"{unit.title}: set_requires_all_reduce(False), and a plan inside nodes reduces every micro-batch; "
                "accumulate with model.set_requires_gradient_sync(False)"
            )
        earlier = self._sums.get((unit.title, flat.numel()))
        self._sums[unit.title, flat.numel()] = flat.clone() if earlier is None else earlier.add_(flat)
        flat.zero_()

    def reduce(self, unit: Unit, output: torch.Tensor, flat: torch.Tensor, times: float) -> None:
        """Reduce `flat` (ranks x elements,) over the node, compressed, into `output` (elements,): the mean, times a
        number. FSDP calls this."""
        with super()._guarded(), _waiting(f"the reduce-scatter of {unit.title} inside a node"):
            unit.require_unchanged()
            self._step_of(unit, flat)
            assert self.inside is not None
            came = unit.padded_gradients(output)
            self.inside.reduce(unit, output, flat, times, _frozen_beside(unit, came, self.inside.plan))

    def _step_of(self, unit: Unit, flat: torch.Tensor) -> Iteration:
        """The step in progress; its first gradient begins it."""
        self._passes.after(unit.module, self._end_step)
        if self._driver.current is None:
            self._steps.before_exchange()
            self._driver.communicator.timeline.begin(self.iteration)
            self._driver.begin()
            if self.inside is not None:
                self.inside.begin(self._around.held.rates(), self._around.loss_scale())
            self._stream = torch.cuda.current_stream(flat.device) if flat.is_cuda else None
        assert self._driver.current is not None
        return self._driver.current

    def _end_step(self) -> None:
        """End the step after backward: commit it, or fill all gradients with NaN, so that a loss scaler skips it."""
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with stream, super()._guarded(), _waiting("the end of the step"):
            current = self._driver.current
            assert current is not None
            require_whole_backward(self._units)
            self._require_attached()
            if self._sums:
                title, _ = next(iter(self._sums))
                raise GradlabError(
                    f"{title}: set_requires_all_reduce(False) puts its gradients off, and others are "
                    "exchanged now; set it for the whole model, whose last micro-batch gives every module gradients"
                )
            current.step.order = _order_of(current.parts)
            came = set(current.step.gradients)
            trained = came - self._frozen
            zeros = current.step.leave_out([name for name in self._shards if name not in trained])
            self._frozen.clear()
            if zeros := {name: zero for name, zero in zeros.items() if name not in came}:
                self._driver.add(Part(len(current.parts), zeros))
                self._driver.drain()
            if self.inside is not None:
                self._judge_inside(self.inside, current)
            if self._parts is not None:
                current.step.finite = not self._some_part_is_bad(self._parts, current.step.finite)
            record = self._driver.finish()
            if self.inside is not None:
                self.inside.end(record.finite)
            if self.parameters is not None:
                self.parameters.end()
            if not record.finite:
                for shard in self._shards.values():
                    shard.fill_gradient(torch.nan)
        if self._stream is not None:
            torch.cuda.current_stream(self._around.device.device).wait_stream(self._stream)

    def _some_part_is_bad(self, parts: dist.ProcessGroup, finite: bool) -> bool:
        """Let the ranks that hold a layer's parts agree on whether all were finite: they take a step or none does."""
        bad = (self._bad | (not finite)).to(torch.uint8)
        self._bad.zero_()
        dist.all_reduce(bad, dist.ReduceOp.MAX, group=parts)
        return bool(bad)

    def _judge_inside(self, inside: ShardReduction, current: Iteration) -> None:
        """Let all ranks of all nodes agree on whether the reduce-scatters were finite, and whether a rule fired."""
        found = self._driver.rules.add(inside.findings()) if inside.finite else False
        assert current.step.order is not None
        flags = torch.tensor([not inside.finite, found, *divmod(current.step.order, 256)], dtype=torch.uint8)
        for ranks in (self._driver.beside, self._driver.communicator):
            assert ranks is not None
            rows = torch.stack(ranks.gather_bytes(flags.to(ranks.device)))
            current.step.mixed = current.step.mixed or bool(rows[:, 2:].ne(rows[0, 2:]).any())
            flags = rows.amax(0)
        not_finite, noticed, *_ = flags.tolist()
        if not_finite:
            current.step.finite = False
        if noticed and not current.step.active:  # else their agreement tells it, with what was found between nodes
            current.step.noticed = True

    def _guarded(self) -> NoReturn:
        """Refuse `begin`, `add`, `finish` and `step`: FSDP's hooks drive the steps."""
        raise GradlabError("this exchange is fed by FSDP's hooks; use Exchange to hand over gradients yourself")

    # --- what it holds ---

    def state_dict(self) -> dict[str, Any]:
        """Collect this rank's state, with the residuals of the plan inside nodes; see `Exchange.state_dict`."""
        states = super().state_dict()
        if self.inside is not None:
            states["inside"] = self.inside.state_dict()
        if self.parameters is not None and self.parameters.held:
            states["parameters"] = self.parameters.state_dict(self._row.rank())
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; see `Exchange.load_state_dict`."""
        resume, hold = self._inside_from([state]), self._held_from(state)
        super().load_state_dict(state)
        resume()
        hold()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], residuals: str) -> None:
        """Continue the run of other nodes that have as many shards each; see `Exchange.load_state_dicts`."""
        checkpoint.check_arguments(states, residuals)
        mine = self.identity.get("part")
        states = [one for one in states if not isinstance(one, Mapping) or one.get("part") == mine]
        column = checkpoint.same_shards(states, self.identity)
        resume = self._inside_from(column, (self.run.rank, self.run.world_size, residuals))
        hold = self._held_from(column[0])
        super().load_state_dicts(column, residuals)
        resume()
        hold()

    def report(self) -> dict[str, Any]:
        """Return `Exchange.report`; under "inside" the bytes of the last step's reduce-scatters, under "parameters"
        those of its all-gathers, where they are compressed."""
        beside = {"inside": self.inside, "parameters": self.parameters}
        return {**super().report(), **{name: one.report() for name, one in beside.items() if one is not None}}

    def _held_from(self, state: Any) -> Callable[[], None]:
        """Check what all ranks held of the parameters, where differences are sent; return what continues with it."""
        if self.parameters is None or not isinstance(state, Mapping):
            return lambda: None
        held = self.parameters.resumption(state.get("parameters"))
        return partial(self.parameters.resume, held, self._row, self._around.device.device)

    def _inside_from(self, states: Sequence[Any], place: tuple[int, int, str] | None = None) -> Callable[[], None]:
        """Check the states of the plan inside nodes; return what continues from them, see `ShardReduction`."""
        saved = [one.get("inside") if isinstance(one, Mapping) else None for one in states]
        if trial() is None and not all(isinstance(one, NoneType if self.inside is None else Mapping) for one in saved):
            has = "no plan" if self.inside is None else "a plan"
            raise GradlabError(f"checkpoint: this run has {has} inside nodes, and the one that was saved differs")
        if self.inside is None:
            return lambda: None
        return partial(self.inside.resume, self.inside.resumptions(saved, place), self._around.device)


def compress_fsdp(
    model: object,
    plan: Plan | str | os.PathLike[str],
    *,
    between: Mesh | None = None,
    within: Mesh | None = None,
    inside: Plan | str | os.PathLike[str] | None = None,
    parameters: Plan | str | os.PathLike[str] | None = None,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
    scaler: Any = None,
    **options: Any,
) -> FSDPCompression:
    """Compress what FSDP2's nodes exchange: the all-reduce between ranks that hold the same shards.

        mesh = init_device_mesh("cuda", (nodes, 8), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        with compress_fsdp(model, "plan.safetensors", between=mesh["replicate"], optimizer=optimizer) as state:
            ...  # the training loop

    Without `with`, keep what it returns: if it is dropped, backward is refused.

    Gradients are summed inside the node by FSDP's reduce-scatter. Then every rank runs the plan on its shards, with the
    ranks of other nodes that hold the same ones. Under native HSDP (`fully_shard(module, mesh=mesh)`) that takes the
    place of FSDP's all-reduce, and `between` need not be given. With a plan that compresses nothing the result is
    native HSDP's, bit for bit; where FSDP sums (`set_gradient_divide_factor`), at 2, 4, 8, ... nodes. After
    `model.set_requires_all_reduce(False)` micro-batches are summed inside nodes, and the first backward pass with it on
    again exchanges the sum.

    All ranks call it together, after the model is materialized, sharded and has its optimizer.

    Args:
        model: model on which `fully_shard` was called, itself and its blocks.
        plan: plan of the model's whole layers, such as one fitted on a DDP recording, or an artifact's path. A codec
            sees the rows of each layer that the rank holds.
        between: the mesh's dimension along which ranks hold the same shards, or that process group. None: nothing is
            compressed between nodes.
        within: the mesh's dimension along which the model is sharded, to compress FSDP's reduce-scatter too. Without
            `between` that alone is compressed. It is for codecs that one rank computes alone, and keeps residuals as
            large as the unsharded gradient.
        inside: the plan of the reduce-scatter, where `plan` is that between nodes.
        parameters: format in which parameters travel in FSDP's all-gathers, such as "int8" or "float8_e4m3fn", for
            matrices but embeddings; or a plan, see `Plan.uniform(..., exchanges="parameters")`. The optimizer's shards,
            checkpoints and evaluation (`model.eval()`) stay exact. None: they travel as they are. From torch 2.8 on.
        optimizer: one or several, all that train the model; see `Exchange`.
        scaler: the loss scaler, if one is in use.
        options: timeout, and those of `Exchange` except hold_unused.

    Returns:
        The state, attached. Close it, or use it as a context manager, when training ends.

    Raises:
        GradlabError: for a model that is not under FSDP2 along one dimension, or has a hook; for a mesh that does not
            fit; for a plan of another model, or whose codecs need whole layers. See `Exchange`.
    """
    options = {"optimizer": optimizer, "scaler": scaler, **options}
    options["parameters"] = parameters
    return FSDPCompression(plan, model, between=between, within=within, inside=inside, **options)


def column_of(
    between: Mesh | None, within: Mesh | None, row: dist.ProcessGroup, device: torch.device
) -> dist.ProcessGroup:
    """Return the ranks that hold the same shards; this one alone where nothing is compressed between nodes."""
    if between is None and within is None:
        raise GradlabError(f"{CALLER}: neither between nor within; {HOW_TO}")
    if within is not None:
        along = group_along(within, "within")
        its = [] if along is None else dist.get_process_group_ranks(along)
        if its != dist.get_process_group_ranks(row):
            shards = dist.get_process_group_ranks(row)
            raise GradlabError(f"{CALLER}: within has the ranks {its}, the model is sharded over {shards}")
    if between is None:
        return part_of((row,), [dist.get_rank()], None, device)
    column = group_along(between, "between")
    if column is None:
        raise GradlabError(f"{CALLER}: between is a process group that this rank is not in")
    return column


def _plan_inside(first: Plan, between: Mesh | None, within: Mesh | None, inside: Any) -> Plan | None:
    """The plan of the reduce-scatters, if they are compressed."""
    if within is None:
        if inside is not None:
            raise GradlabError(f"{CALLER}: inside is the plan of the reduce-scatter; give within=mesh['shard'] too")
        return None
    if between is None:
        if inside is not None:
            raise GradlabError(f"{CALLER}: without between, the plan itself is that of the reduce-scatter")
        return first
    if inside is None:
        raise GradlabError(f"{CALLER}: between and within: give inside= too, the plan of the reduce-scatter")
    return given_plan(inside, CALLER)


def _warn_of_the_rest(row: dist.ProcessGroup) -> None:
    if dist.get_rank(row) == 0:
        ranks = dist.get_process_group_ranks(row)
        warnings.warn(
            f"gradlab: the model is sharded over ranks {ranks} of {dist.get_world_size()}, and without between= its "
            "gradients are averaged with no others; with a Plan of no groups they are, uncompressed",
            stacklevel=4,
        )


def _check_hooks(units: Sequence[Unit], within: Mesh | None) -> None:
    if hooked := attached_hooks(units):
        raise GradlabError(f"{CALLER}: {hooked[0]} has an all-reduce hook already, and FSDP takes one")
    if within is not None and (replaced := custom_reductions(units)):
        raise GradlabError(f"{CALLER}: {replaced[0]} has a reduce-scatter of its own already, and FSDP takes one")


def _same_everywhere(levels: Levels, chosen: RunOptions) -> dict[str, Any]:
    digests = [None if one is None else one.digest for one in (levels.inside, levels.parameters)]
    names = ("the plan inside nodes (sha256)", "the plan of parameters (sha256)")
    return {**chosen.same_everywhere(levels.whole), **dict(zip(names, digests, strict=True))}


def _plan_of_gathers(units: Sequence[Unit], parameters: Any, layers: Sequence[Layer]) -> Plan | None:
    """The plan of the all-gathers, if they are compressed. layers: the model's whole ones."""
    if parameters is None:
        return None
    plan = parameter_plan(layers, parameters, CALLER)
    require_native_gathers(units, CALLER)
    if difference := describe_difference(plan.layers, layers):
        raise GradlabError(f"{CALLER}: parameters: the plan is of another model: {difference[0]}")
    return plan


def _reduce(
    state: weakref.ref[FSDPCompression], unit: Unit, output: torch.Tensor, flat: torch.Tensor, times: float
) -> None:
    _alive(state).reduce(unit, output, flat, times)


def _hook(state: weakref.ref[FSDPCompression], unit: Unit, flat: torch.Tensor) -> None:
    _alive(state).take(unit, flat)


def _alive(state: weakref.ref[FSDPCompression]) -> FSDPCompression:
    alive = state()
    if alive is None:
        raise GradlabError("the compression of this FSDP model was dropped; keep what compress_fsdp returned")
    return alive


def _frozen_beside(unit: Unit, came: Collection[str], plan: Plan) -> dict[str, Shard]:
    """Return a unit's shards of parameters that were frozen since, whose groups came but for them: FSDP takes a group's
    results when the hook returns. A group without some of its trainable layers is refused."""
    missing = {shard.layer.name: shard for shard in unit.shards if shard.layer.name not in came}
    beside: dict[str, Shard] = {}
    for group in plan.compressed_groups if missing else ():
        left = {name: missing[name] for name in group.layers if name in missing}
        if not 0 < len(left) < len(group.layers):
            continue
        if late := [name for name, shard in left.items() if shard.parameter.requires_grad]:
            raise GradlabError(
                f"{unit.title}: {late[0]} has no gradient yet, and others of group {group.name} have; give layers "
                "that are reduced apart, as by a loss taken in pieces, groups of their own"
            )
        beside |= left
    return beside


def _order_of(parts: Iterable[Part]) -> int:
    """Return 16 bits of the order in which units came, which differ where ranks used different ones."""
    return zlib.crc32("\n".join(next(iter(part.gradients), "") for part in parts).encode()) % 2**16


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Name what waited for other ranks, if one of them did not answer."""
    try:
        yield
    except CommunicationError as error:
        raise CommunicationError(f"{what} waited for a rank that is gone or stuck: {error}") from error
