"""Notice local steps that are no optimizer steps, as where `OuterStep.step` is called after every micro-batch."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlab.ddp.copies import Hook

_LOOKS = 16  # local steps that are looked at; a loss scaler skips fewer than half of these at the beginning


class OptimizerSteps:
    """Compares the first local steps with the steps of whatever optimizers hold the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(one) for one in parameters}
        self._seen = self._stepped = 0
        self._since = False
        self._handle = register_optimizer_step_pre_hook(Hook(partial(_note, weakref.ref(self))))
        weakref.finalize(self, self._handle.remove)

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer's step. Its first parameter tells whether it is of this model."""
        first = next((id(one) for group in optimizer.param_groups for one in group["params"]), None)
        self._since = self._since or first in self._parameters

    def after(self, caller: str) -> bool:
        """Note a local step; at the last one that is looked at (True), warn if most were no optimizer steps."""
        self._seen += 1
        self._stepped += self._since
        self._since = False
        if self._seen < _LOOKS:
            return False
        if 0 < self._stepped <= _LOOKS // 2:
            warnings.warn(
                f"{caller}: only {self._stepped} of the first {_LOOKS} calls of step() came after an optimizer step, "
                "as where micro-batches are accumulated, so that workers exchange too often; call it after "
                "optimizer.step() alone (with Accelerate: if accelerator.sync_gradients)",
                stacklevel=3,
            )
        self._handle.remove()
        return True


def _note(counts: weakref.ref[OptimizerSteps], optimizer: torch.optim.Optimizer, *arguments: object) -> None:
    if (alive := counts()) is not None:
        alive.note(optimizer)
