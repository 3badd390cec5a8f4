"""Emulated ranks in a run that `gradlab pilot` has started: the trial's plan averages, in lockstep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradlab.codec import Tensors
from gradlab.ddp.optimizers import HeldLayers
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer
from gradlab.plan.plan import check_model
from gradlab.trial import Trial


class TrialOfNodes:
    """The plan of a trial between the ranks that one process plays. Memory: each rank's gradient."""

    def __init__(
        self, trial: Trial, pairs: Sequence[tuple[Layer, nn.Parameter]], world_size: int, optimizer: Any, scaler: Any
    ) -> None:
        check_model(trial.plan, [layer for layer, _ in pairs])
        self._trial, self._scaler = trial, scaler
        self._parameters = {layer.name: parameter for layer, parameter in pairs}
        self._held = HeldLayers(optimizer, {parameter: layer.name for layer, parameter in pairs})
        self._lockstep = LockstepPlan(trial.plan, world_size, self._held.plain_sgd(), hold_unused=True)
        self._gradients: list[Tensors] = []
        self._iteration = 0
        trial.emulate(world_size, scaler)

    def add(self, rank: int) -> None:
        """Take a rank's gradients and loss, once its pass is made."""
        del self._gradients[rank:]  # of a step that failed
        self._gradients.append(
            {
                name: torch.zeros_like(one) if one.grad is None else one.grad.detach().to_dense().clone()
                for name, one in self._parameters.items()
            }
        )
        self._trial.end_rank(rank)

    @torch.no_grad()
    def end_step(self) -> None:
        """Put the plan's mean into .grad, where the plain one is, which layers of no group, and held ones, keep.

        Exits after the trial's last step.
        """
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        gradients = self._gradients
        if scale != 1.0:
            gradients = [{name: one / scale for name, one in rank.items()} for rank in gradients]
        self._held.look()
        values = {name: one.detach() for name, one in self._parameters.items()}
        result = self._lockstep.step(self._iteration, gradients, self._held.rates(), scale, values)
        self._iteration, self._gradients = self._iteration + 1, []
        for ranks in result.exchanged.values():
            for name, mean in ranks[0].mean.items():
                gradient = self._parameters[name].grad
                if gradient is not None and name not in result.held:
                    gradient.copy_(mean * scale if result.finite else torch.full_like(mean, torch.nan))
        self._trial.end_step()
