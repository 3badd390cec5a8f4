"""Notice a training that other optimizers step than those that a pilot puts back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlab.ddp.copies import Hook
from gradlab.ddp.optimizers import HeldLayers


class StepWatch:
    """Sees every step of every optimizer (bare) from now on."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[torch.Tensor, str]) -> None:
        self._optimizers, self._held = optimizers, HeldLayers(optimizers, names)
        self._stepped = False
        self._others: dict[str, str] = {}
        method = weakref.WeakMethod(self._note)

        def note(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
            if (alive := method()) is not None:
                alive(optimizer)

        self._handle = register_optimizer_step_pre_hook(Hook(note))

    def _note(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped = self._stepped or any(optimizer is one for one in self._optimizers)
        for layer in self._held.taken_by(optimizer)[:1]:
            self._others[type(optimizer).__name__] = layer

    def problem(self, batches: int) -> str | None:
        """Say what the training of so many batches did that a pilot cannot put back; None: nothing."""
        for kind, layer in self._others.items():
            return (
                f"{kind} steps {layer}, and was not given to the pilot, which would not put its state back; give all "
                "optimizers: Pilot(model, [first, second], plans)"
            )
        seen = all(isinstance(one, torch.optim.Optimizer) for one in self._optimizers)
        if seen and not self._stepped:
            kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in self._optimizers)) or "no optimizer"
            return (
                f"{kinds} took no step on {batches} batches; give the pilot the optimizer that trains the model, and "
                "step it in the loop"
            )
        return None

    def close(self) -> None:
        """See no more steps."""
        self._handle.remove()
