"""Learn when optimizers step, without holding on to whoever wants to know."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradlab.ddp.copies import Hook


def after_each_step(
    optimizers: Iterable[torch.optim.Optimizer], act: Callable[[torch.optim.Optimizer], None]
) -> list[Any]:
    """Call a method after every step of some optimizers.

    A GradScaler does not call `step` of an optimizer whose gradients are not finite, so no such step is seen.

    Args:
        optimizers: bare ones. Those without torch's hooks are left out.
        act: a bound method. Its object is not kept alive.

    Returns:
        Handles with `remove`; none if no optimizer's steps can be seen.
    """
    method = weakref.WeakMethod(act)

    def hook(optimizer: torch.optim.Optimizer, *arguments: object) -> None:
        if (alive := method()) is not None:
            alive(optimizer)

    return [one.register_step_post_hook(Hook(hook)) for one in optimizers if hasattr(one, "register_step_post_hook")]
