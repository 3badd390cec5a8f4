"""Learn when optimizers step, without holding on to whoever wants to know."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlab.ddp.copies import Hook, take_away


def at_each_step(
    optimizers: Iterable[torch.optim.Optimizer], act: Callable[[torch.optim.Optimizer], None]
) -> list[Any]:
    """Call a bound method, whose object is not kept alive, before every step of bare optimizers, or after one whose
    closure computes the gradients; return handles with `remove`. A step that a GradScaler skips is not seen."""
    method = weakref.WeakMethod(act)

    def call(
        with_closure: bool, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        closure = named.get("closure", arguments[1] if len(arguments) > 1 else None)  # behind the optimizer itself
        if (closure is not None) == with_closure and (alive := method()) is not None:
            alive(optimizer)

    handles: list[Any] = []
    for one in optimizers:
        if hasattr(one, "register_step_pre_hook"):
            handles.append(one.register_step_pre_hook(Hook(call, False)))
            handles.append(one.register_step_post_hook(Hook(call, True)))
    return handles


class LocalPasses:
    """Counts backward passes since the last one whose gradients ranks averaged, by two parameters of a model in DDP.
    DDP averages in the first pass after its own forward pass outside `no_sync`; further ones stay local."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._passes = 0
        self._watched = [*parameters[:1], *parameters[1:][-1:]]
        method = weakref.WeakMethod(self._accumulated)
        self._handles = [one.register_post_accumulate_grad_hook(Hook(call_alive, method)) for one in self._watched]

    def exchanged(self) -> None:
        """Note that ranks have averaged all gradients."""
        self._passes = 0

    @property
    def unaveraged(self) -> bool:
        """Whether a pass came since ranks averaged."""
        return self._passes > 0

    def applied_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether a step of an optimizer applies what ranks have not averaged. It copies to the host if so."""
        if not self._passes:
            return False
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        applied = [one.grad for one in self._watched if one.grad is not None and id(one) in held]
        return any(bool(gradient.detach().any()) for gradient in applied)

    def close(self) -> None:
        """Stop counting. Idempotent."""
        take_away(self._handles)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._passes += 1


def call_alive(method: weakref.WeakMethod[Callable[..., None]], *arguments: object) -> None:
    """Call a method unless its object is gone."""
    if (alive := method()) is not None:
        alive(*arguments)


def at_any_step(act: Callable[..., None]) -> Any:
    """Call a bound method, whose object is not kept alive, before every step of any bare optimizer of this process;
    return a handle with `remove`."""
    return register_optimizer_step_pre_hook(Hook(call_alive, weakref.WeakMethod(act)))


_LOOKS = 16  # local steps that are looked at; a loss scaler skips fewer than half of these at the beginning


class CallsBesideSteps:
    """Compares the first local steps with the steps of whatever optimizers hold the parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(one) for one in parameters}
        self._seen = self._stepped = 0
        self._since = False
        self._handle = at_any_step(self._note)
        weakref.finalize(self, self._handle.remove)

    def _note(self, optimizer: torch.optim.Optimizer, *arguments: object) -> None:
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
