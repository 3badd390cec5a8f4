"""Learn when optimizers step, without holding on to whoever wants to know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from gradlab.ddp.copies import Hook


def at_each_step(
    optimizers: Iterable[torch.optim.Optimizer], act: Callable[[torch.optim.Optimizer], None]
) -> list[Any]:
    """Call a method at every step of some optimizers, once the gradients are there.

    That is before the step, so that what is let go of does not lie in memory beside the step's own; or after it, where
    a closure computes the gradients within the step. A GradScaler does not call `step` of an optimizer whose gradients
    are not finite, so no such step is seen.

    Args:
        optimizers: bare ones. Those without torch's hooks are left out.
        act: a bound method. Its object is not kept alive.

    Returns:
        Handles with `remove`; none if no optimizer's steps can be seen.
    """
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
            handles.append(one.register_step_pre_hook(Hook(partial(call, False))))
            handles.append(one.register_step_post_hook(Hook(partial(call, True))))
    return handles
