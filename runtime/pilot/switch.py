"""The one communication hook of a DDP model, which changes what it runs. DDP takes one, and never gives it back."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes, not with their names.
import weakref

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from gradlab.errors import GradlabError
from gradlab.runtime.checks import check_ddp
from gradlab.runtime.state import CompressionState


class Switch:
    """A model's hook: a state's plan, or without one plain averages, as DDP makes them."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.state: CompressionState | None = None
        self.group = model.process_group


_SWITCHES: weakref.WeakKeyDictionary[DistributedDataParallel, Switch] = weakref.WeakKeyDictionary()


def switched_hook(switch: Switch, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as the switch stands."""
    return allreduce_hook(switch.group, bucket) if switch.state is None else switch.state.submit(bucket)


def switch_of(model: DistributedDataParallel) -> Switch | None:
    """Return the switch that a model's hook has, if a pilot gave it one."""
    return _SWITCHES.get(model)


def switched(model: DistributedDataParallel) -> Switch:
    """Give a model a hook with a switch, unless it has one; refuse a model that is compressed."""
    if (switch := switch_of(model)) is None:
        check_ddp(model, None, None)
        switch = Switch(model)
        model.register_comm_hook(switch, switched_hook)
        _SWITCHES[model] = switch
    if switch.state is not None:
        raise GradlabError("the DDP model is compressed already: let a pilot try plans before that")
    return switch
