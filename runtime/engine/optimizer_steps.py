"""Follow a run's optimizers, so that an iteration is an optimizer step and not a backward pass.

Several synchronised backward passes may come between two optimizer steps: somebody wrote `no_sync` around the backward
pass alone, another network's loss passed through this model, or a bad batch was left out. If gradients are still there
when the next pass adds to them, residuals are right as they are. If they were dropped, the exchange is never applied,
and the states become those of the last optimizer step again.

The gradients just before the pass adds to them show which of the two it was. A step that follows its exchange, as
most do, costs a look at a counter.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from gradlab.codec.wrapper import wrappers_of
from gradlab.ddp.copies import Hook, take_away
from gradlab.ddp.optimizer_steps import LocalPasses, at_each_step, call_alive
from gradlab.executor import PlanRun
from gradlab.executor.rules import LOCAL_GRADIENTS, finding, several_passes
from gradlab.runtime.engine.driver import StepDriver
from gradlab.runtime.engine.worker import Engine

_WITHOUT_A_STEP = 8  # exchanges after which an optimizer that never stepped is taken for one that never will


class OptimizerSteps:
    """One rank's record of its optimizers' steps. Without optimizers each exchange is a step.

    model: DDP model, whose hook sees gradients that a pass has been added to; None without DDP.
    engine: worker that drives the steps, if there is one: what it has ended is looked at, and nothing before.
    """

    def __init__(
        self,
        driver: StepDriver,
        parameters: Mapping[str, torch.Tensor],
        model: nn.Module | None = None,
        engine: Engine | None = None,
    ) -> None:
        optimizers = driver.held.holding
        self.runs: list[PlanRun] = [driver.run]
        self._driver, self._parameters, self._engine = driver, dict(parameters), engine
        self._several = len(optimizers) > 1
        self._steps = self._dropped = self._unseen = 0
        self._forward_seen = model is None
        self._before: dict[str, torch.Tensor | None] = {}  # by layer: whether its gradient was not zero; None: none
        self._looking: list[Any] = []  # handles, while the next pass is looked at
        self._handles = at_each_step(optimizers, self._stepped)
        self._in_ddp = model is not None
        self._local: LocalPasses | None = None  # from the first exchange on, in DDP
        if self._handles and model is not None:
            self._handles.append(model.register_forward_pre_hook(Hook(call_alive, weakref.WeakMethod(self._forward))))
        self.follow(driver.run)

    def follow(self, run: PlanRun) -> None:
        """Follow another run of the same steps too."""
        run.open_step.followed = bool(self._handles)
        if run not in self.runs:
            self.runs.append(run)

    def close(self) -> None:
        """Take all hooks away. Idempotent."""
        self._stop_looking()
        if self._local is not None:
            self._local.close()
        take_away(self._handles)

    # --- before an exchange ---

    def _forward(self, *arguments: object) -> None:
        """Look at gradients in the next backward pass, if some are open."""
        if torch.is_grad_enabled():
            self._forward_seen = True
            self._wait()
            if self._is_open and not self._looking:
                for name, parameter in self._parameters.items():
                    if parameter.requires_grad:
                        node = torch.autograd.graph.get_gradient_edge(parameter).node
                        look = partial(self._look, name, weakref.ref(parameter))
                        self._looking.append(node.register_prehook(look))

    def _look(self, name: str, parameter: weakref.ref[torch.Tensor], gradients: object) -> None:
        """Note a gradient before a backward pass adds to it."""
        one = parameter()
        gradient = None if one is None else one.grad
        if gradient is None:
            self._before[name] = None
        elif name not in self._before:
            self._before[name] = gradient.any()
        elif (before := self._before[name]) is not None:  # passes under no_sync: it may have been zeroed before any
            self._before[name] = before & gradient.any()

    def _stop_looking(self) -> None:
        take_away(self._looking)
        self._before = {}

    @property
    def _is_open(self) -> bool:
        return any(run.open_step.exchanges or run.open_step.states for run in self.runs)

    def before_exchange(self) -> None:
        """Learn what became of the last exchange's results. Called with the first gradients of a backward pass."""
        self._wait()
        if not self._handles:
            return
        known, self._forward_seen = self._forward_seen, not self._in_ddp
        if self._is_open:
            if known:
                self._resolve()
            else:
                for run in self.runs:
                    run.open_step.forget()
            self._driver.all_dense = not self._driver.run.active
        for run in self.runs:  # under join, a rank without input left has no forward pass and no optimizer step
            run.open_step.followed = known and self._unseen < _WITHOUT_A_STEP
        self._stop_looking()

    def after_exchange(self) -> None:
        """Note that DDP has handed over all gradients of a backward pass."""
        if self._local is not None:
            self._local.exchanged()
        elif self._handles:
            self._local = LocalPasses(list(self._parameters.values()))

    def _resolve(self) -> None:
        seen = self._driver.run.open_step.seen
        dropped = self._dropped_layers()
        every = len(dropped) == len(self._parameters)
        skipped = every and self._driver.around.loss_scale() < self._driver.statistics.steps[-1].loss_scale
        for run in self.runs:
            now = run.iteration
            names = [one for one in run.open_step.states if dropped.issuperset(run.groups[one].layers)]
            run.go_on(names)
            if every:
                run.open_step.taken_back += not (seen or skipped)
                run.open_step.forget()
            if skipped:  # by a loss scaler: such steps count as iterations
                run.iteration = now
        if not seen:
            self._unseen += 1
            if self._unseen >= _WITHOUT_A_STEP:
                for run in self.runs:
                    run.open_step.forget()
        elif every and not skipped:
            self._dropped += 1
            if self._dropped > 1 and 2 * self._dropped >= self._steps:
                passes = f"{self._dropped} synchronised backward passes whose gradients were dropped"
                passes += f", beside {self._steps} optimizer steps"
                self._tell("several_backwards", passes, self._dropped, self._driver.run.iteration)

    def _dropped_layers(self) -> frozenset[str]:
        """Return the layers whose gradient is not what the last exchange made of it: none is there, or all are zero."""
        values = {name: self._before.get(name, p.grad) for name, p in self._parameters.items()}
        none = frozenset(name for name, value in values.items() if value is None)
        if any(bool(_local(value).any()) for value in values.values() if value is not None):
            return none
        return frozenset(values)

    # --- at an optimizer step ---

    def _wait(self) -> None:
        if self._engine is not None:
            self._engine.wait()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._driver.in_progress or self._driver.broken is not None:
            return  # a step within a backward pass: nothing is known of it
        local = self._local is not None and self._local.applied_by(optimizer)
        held = self._held_by(optimizer) if self._several else None
        if self._engine is None:
            self._note(local, held)
        else:  # without a wait for it: the optimizer's work is what the device has to do meanwhile
            self._engine.after_step(partial(self._note, local, held))

    def _note(self, local: bool, held: frozenset[str] | None) -> None:
        """Note an optimizer step of some layers, or all. local: it applies what ranks did not average."""
        if local:
            self._tell("local_gradients", LOCAL_GRADIENTS, 1, self._driver.run.iteration - 1)
        exchanges = self._driver.run.open_step.exchanges
        self._unseen = 0
        for run in self.runs:
            run.applied(None if held is None else [one for one in run.groups if held & set(run.groups[one].layers)])
        self._driver.all_dense = not self._driver.run.active
        if exchanges:
            self._steps += 1
        if exchanges > 1:
            seen = several_passes(exchanges) + ", each with momentum" * self._momentum
            self._tell("several_backwards", seen, exchanges, self._driver.run.iteration - 1)

    def _held_by(self, optimizer: torch.optim.Optimizer) -> frozenset[str]:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return frozenset(name for name, parameter in self._parameters.items() if id(parameter) in held)

    @property
    def _momentum(self) -> bool:
        codecs = self._driver.run.codecs.values()
        return any(wrapper.effects.applies_momentum for codec in codecs for wrapper in wrappers_of(codec))

    def _tell(self, rule: str, seen: str, value: int, step: int) -> None:
        """Tell at once: all ranks see it at the same step."""
        self._driver.rules.tell([finding(rule, seen, value, int(value > 1), step=step)])


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's part of a gradient."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient
