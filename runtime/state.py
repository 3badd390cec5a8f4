"""The state that the DDP communication hook is registered with."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.averaged import AveragedLayers, not_averaged
from gradlab.ddp.bucket_layouts import BucketLayouts
from gradlab.ddp.copies import Hook, take_away
from gradlab.ddp.groups import group_like
from gradlab.ddp.model import require_ddp, synchronised_layers
from gradlab.ddp.switch import attached_hook
from gradlab.ddp.topology import NODE, find_topology
from gradlab.errors import GradlabError
from gradlab.executor.rules import Finding, finding
from gradlab.plan import Plan
from gradlab.runtime.checks import (
    Pairs,
    agree_on,
    check,
    check_ddp,
    check_nodes,
    device_of_model,
    given_plan,
    named_as_in,
)
from gradlab.runtime.engine.device import device_of
from gradlab.runtime.engine.driver import StepDriver
from gradlab.runtime.engine.optimizer_steps import OptimizerSteps
from gradlab.runtime.engine.options import RunOptions, Surroundings
from gradlab.runtime.engine.worker import Engine
from gradlab.runtime.exchange import Exchange, plain_driver
from gradlab.trial import trial


class CompressionState(Exchange):
    """An `Exchange` that DDP's buckets feed, one worker thread beside backward.

    All ranks construct it together (it makes a process group of its own and compares plans). Register it with

        ddp_model.register_comm_hook(state, compression_hook)

    and close it, or use it as a context manager, when training ends. `gradlab.compress` does both. If backward passes
    came and none reached the hook, closing gives a warning that says what to call.

    >>> from gradlab.runtime import CompressionState, compression_hook
    >>> ddp_model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 32))
    >>> with CompressionState(Plan.uniform(ddp_model, "powersgd", rank=2), ddp_model) as state:
    ...     ddp_model.register_comm_hook(state, compression_hook)
    ...     ddp_model(torch.ones(8, 64)).square().sum().backward()
    >>> state.iteration
    1

    Args:
        plan: plan of this model's trainable parameters, or the path of an artifact.
        ddp_model: the DistributedDataParallel model, or what torch.compile made of it.
        process_group: group of the DDP ranks for the codecs' collectives alone: DDP's own must not mix with them in
            another order. None makes one. If DDP runs on a part of the world only, torch names that group after the
            number of groups a process has made; where ranks have made different numbers, pass one instead.
        timeout: timeout of the collectives of groups made here. None: that of the model's group.
        within: the ranks of this rank's node, which are averaged before the plan compresses between nodes: one
            dimension of a DeviceMesh (`mesh["local"]`), a process group, or "node" for the machine that torchrun tells
            by LOCAL_RANK and LOCAL_WORLD_SIZE. "node" takes ranks together only where several machines have as many
            ranks each, and more than one. None: every rank compresses for itself.
        options: optimizer, scaler, deterministic, segment_bytes, measure_every, trace_steps, non_finite_limit, rules,
            check_requests and history of `Exchange`; hold_unused follows from the model's find_unused_parameters and
            static_graph.

    Raises:
        GradlabError: if the model is not in DDP or is not the plan's (with a layer-by-layer difference), the plan and
            the optimizer both apply momentum or weight decay, or ranks have different plans.
    """

    def __init__(
        self,
        plan: Plan | str | os.PathLike[str],
        ddp_model: DistributedDataParallel,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        within: dist.DeviceMesh | dist.ProcessGroup | str | None = NODE,
        **options: Any,
    ) -> None:
        ddp_model = require_ddp(ddp_model, "CompressionState")
        running = trial()
        if running is not None:
            plan, options = running.plan, running.options(options)
        chosen = RunOptions(hold_unused=ddp_model.find_unused_parameters or ddp_model.static_graph, **options)
        ranks, first_device = ddp_model.process_group, next(ddp_model.parameters()).device
        averaged, topology = AveragedLayers(ddp_model), find_topology(within, ranks, first_device)

        def attempt() -> tuple[Plan, Pairs]:
            whole = given_plan(plan, "CompressionState")
            pairs = named_as_in(whole, synchronised_layers(ddp_model))
            check(whole, pairs, ranks.size() if topology is None else len(topology.nodes), chosen)
            check_ddp(ddp_model, process_group, timeout)
            averaged.require(pairs)
            averaged.refuse_frozen()
            if topology is not None:
                check_nodes(whole, topology)
            return whole, pairs

        plan, pairs = agree_on((ranks,), first_device, attempt, lambda done: chosen.same_everywhere(done[0]))
        device = device_of(device_of_model(pairs))
        group = process_group or group_like(ranks, timeout, device.device)
        # Of groups made here the communicators alone hold on: destroying them is how peers learn of a failure.
        owned = process_group is None
        parameters = {layer.name: parameter for layer, parameter in pairs}
        around = Surroundings(parameters, chosen, device)
        if topology is None:
            driver = plain_driver(plan, group, around, owned=owned)
        else:
            from gradlab.runtime.engine.nodes import node_driver

            driver = node_driver(plan, group, around, topology, owned=owned)
        del group
        self.engine = Engine(driver, device)
        self._set_up(plan, driver)
        self._names: dict[torch.Tensor, str] = {parameter: layer.name for layer, parameter in pairs}
        self._layouts = BucketLayouts(ddp_model, rearrange=True)
        self._unreached = UnreachedHook(ddp_model, list(self._names))
        self._averaged, self._not_come = averaged, set(self._names.values())
        self._steps = OptimizerSteps(driver, parameters, ddp_model, self.engine)
        # Also when the state is dropped, and at exit: a script that forgets close() still ends, without a stray thread.
        ends = self.engine, driver, self._unreached, averaged, self._steps
        self._finalizer = weakref.finalize(self, partial(_end, *ends))
        if running is not None:
            running.follow(self, chosen.scaler)

    @classmethod
    def load(cls, path: str | os.PathLike[str], ddp_model: DistributedDataParallel, **options: Any) -> CompressionState:
        """Make the state for a saved artifact.

        Args:
            path: the artifact.
            ddp_model: the DistributedDataParallel model.
            options: those of the constructor.

        Returns:
            The state, to register with the model.

        Raises:
            GradlabError: for an artifact that is missing, damaged, of a newer version, or for another model.
        """
        return cls(path, ddp_model, **options)

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand one of DDP's buckets to the engine. The hook calls this.

        Args:
            bucket: DDP's.

        Returns:
            A future of the bucket's buffer, averaged.

        Raises:
            GradlabError: for a layer that the plan does not have, a layer of the plan that DDP does not average, or a
                sparse gradient.
        """
        self._unreached.reached()
        if bucket.index() == 0:
            self._tell_of(self._averaged.look())
            self._averaged.refuse_uneven_division()
            self._steps.before_exchange()
        # Buckets are rebuilt after the first iteration, so look up each time which layers one holds.
        found = self._layouts.gradients(bucket)
        try:
            gradients = {self._names[parameter]: gradient for parameter, gradient in found}
        except KeyError:  # zeros, of a layer that was frozen after DDP was made; or what is refused
            self._averaged.refuse_thawed(parameter for parameter, _ in found if parameter not in self._names)
            gradients = {self._names[parameter]: value for parameter, value in found if parameter in self._names}
        if self._not_come:
            self._not_come -= gradients.keys()
            if bucket.is_last() and self._not_come:
                raise GradlabError(not_averaged(sorted(self._not_come)))
        if bucket.is_last():
            self._steps.after_exchange()
        return self.engine.submit(bucket.index(), bucket.is_last(), bucket.buffer(), gradients)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return what the rules have found so far, the same on all ranks."""
        self._tell_of(self._averaged.missing())
        return super().findings

    def _tell_of(self, missing: list[str]) -> None:
        """Find layers that DDP does not average. All ranks see the same ones, unless they train different models."""
        if missing:
            found = [drifting(missing, self.iteration)]
            if self.run.groups:
                self._driver.rules.add(found)
            else:  # no codec, so no agreement that would carry it
                self._driver.rules.tell(found)

    def _guarded(self) -> NoReturn:
        """Refuse `begin`, `add`, `finish` and `step`: the worker drives the steps."""
        raise GradlabError("a CompressionState is fed by DDP's hook; use Exchange to hand over gradients yourself")


def _after_the_worker(name: str) -> Any:
    """Make the property of an attribute that is read once the worker has ended the step at hand."""

    def read(state: CompressionState) -> Any:
        state.engine.wait()
        return vars(state)[name]

    def write(state: CompressionState, value: Any) -> None:
        vars(state)[name] = value

    return property(read, write)


for _name in ("run", "statistics"):
    setattr(CompressionState, _name, _after_the_worker(_name))


def _end(
    engine: Engine, driver: StepDriver, unreached: UnreachedHook, averaged: AveragedLayers, steps: OptimizerSteps
) -> None:
    """Stop the worker; tell of backward passes and layers that the hook did not get. An error on its way says more."""
    unreached.end()
    steps.close()
    failed = driver.broken is not None
    engine.close()
    if not failed:
        missing = averaged.missing()
        found = [unreached.finding(), drifting(missing, driver.run.iteration) if missing else None]
        driver.rules.tell([one for one in found if one is not None])


def drifting(missing: Sequence[str], step: int) -> Finding:
    """Return the finding of layers that are trained and that DDP does not average, as seen at a step."""
    return finding("layer_not_averaged", not_averaged(missing), len(missing), 0, step=step)


class UnreachedHook:
    """Counts backward and forward passes until the hook is reached for the first time.

    It keeps neither the model nor a state alive, so that both can be dropped without closing.
    """

    def __init__(self, model: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
        self._model = weakref.ref(model)
        self._accumulated: Counter[int] = Counter()
        self._calls = self._synchronised_calls = 0
        self._handles: list[Any] = [model.register_forward_pre_hook(Hook(self._forward))]
        for number, parameter in enumerate(parameters):
            self._handles.append(parameter.register_post_accumulate_grad_hook(partial(self._backward, number)))

    def _forward(self, model: DistributedDataParallel, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._calls += 1
            self._synchronised_calls += bool(model.require_backward_grad_sync)

    def _backward(self, number: int, parameter: torch.Tensor) -> None:
        self._accumulated[number] += 1

    def end(self) -> None:
        """Stop counting: the hook was reached, or the run is over."""
        take_away(self._handles)

    def reached(self) -> None:
        """Note that the hook got a bucket. The first time ends the counting."""
        if self._handles:
            self.end()
            self._accumulated.clear()

    def finding(self) -> Finding | None:
        """Say which passes never reached the hook, and what to call; None if there were none."""
        passes = max(self._accumulated.values(), default=0)
        if not passes:
            return None
        count = f"{passes} backward passes" if passes > 1 else "a backward pass"
        seen = f"{count} of this model, none of which reached the CompressionState"
        return Finding("hook_not_reached", None, None, passes, 0, seen, "; ".join(self._reasons()))

    def _reasons(self) -> list[str]:
        model = self._model()
        hook = None if model is None else attached_hook(model)
        reasons = []
        if model is not None and hook is None:
            reasons.append(
                "it was not registered, so nothing was compressed; call ddp_model.register_comm_hook(state, "
                "compression_hook), or make the state with gradlab.compress(ddp_model, plan), which does it"
            )
        if not self._calls:
            reasons.append(
                "the DDP model itself was never called, so gradients were not even averaged; call ddp_model(...), "
                "not the module inside it"
            )
        elif not self._synchronised_calls:
            reasons.append(
                "all were under no_sync, which exchanges nothing; leave the last forward and backward pass before "
                "optimizer.step() outside of it"
            )
        return reasons or [
            "DDP was not prepared for them; in Lightning's manual optimization call self.manual_backward(loss), not "
            f"loss.backward() (the model's communication hook is {hook or 'unknown, as the model is gone'})"
        ]
