"""Plain DDP's average from inside a hook, and a hook that gives way: DDP takes one, and never gives it back."""

# No `from __future__ import annotations` here: DDP compares a hook's annotations with the types themselves.

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.copies import Uncopied
from gradlab.ddp.model import divides_by_inputs
from gradlab.errors import GradlabError

Given = tuple[Any, Callable[..., Any]]  # a state and its hook, as DDP takes them


class PlainAverage:
    """Average buckets bit for bit as DDP without a hook does.

    Plain DDP multiplies every gradient by 1/N while it copies it into the bucket, then sums the bucket's whole buffer
    over the ranks. N is the number of ranks, or under join(divide_by_initial_world_size=False) of those that have input
    left. A hook finds the bucket unscaled. (PyTorch's own allreduce_hook divides by N instead, which differs in the
    last bit where N is not a power of two.) One case cannot be told apart from inside a hook: with
    gradient_as_bucket_view=True and gradients that are zeroed rather than dropped, plain DDP divides too.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        # DDP holds its hook's state where the garbage collector does not see it, and it must not hold the model.
        self._model, self._group = weakref.ref(model), model.process_group
        self._divisor = self._group.size()

    def __call__(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return a future of the bucket's buffer, averaged."""
        model, buffer = self._model(), bucket.buffer()
        assert model is not None
        if bucket.index() == 0:
            by_inputs = divides_by_inputs(model)
            self._divisor = ranks_with_input(self._group, model.device) if by_inputs else self._group.size()
        if buffer.is_sparse:
            buffer.div_(self._divisor)
        else:
            buffer.mul_(1.0 / self._divisor)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


def ranks_with_input(group: dist.ProcessGroup, device: torch.device) -> int:
    """Count ranks with input left under `join`: others run the hook outside of a backward pass. A collective."""
    flag = torch.tensor([float(torch._C._current_graph_task_id() != -1)], device=device)
    dist.all_reduce(flag, group=group)
    return int(flag.item())


class Switch(Uncopied):
    """A model's hook: another one, or for None plain DDP's averages."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.average = PlainAverage(model)
        self.given: Given | None = None


_SWITCHES: weakref.WeakKeyDictionary[DistributedDataParallel, Switch] = weakref.WeakKeyDictionary()


def switched_hook(switch: Switch, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as the switch stands."""
    if switch.given is None:
        return switch.average(bucket)
    state, hook = switch.given
    return hook(state, bucket)


def attached_hook(model: DistributedDataParallel) -> str | None:
    """Return the name of the communication hook that a model has; None of a free one, or of a switch to plain DDP."""
    if (switch := _SWITCHES.get(model)) is not None:
        return getattr(switch.given[1], "__name__", "switched_hook") if switch.given else None
    # DDP's logger knows of built-in ones too; a copy keeps the original's list of hooks, and its reducer has none.
    return model._get_ddp_logging_data().get("comm_hook") or None


def switched(model: DistributedDataParallel) -> Switch:
    """Return the switch of a model that no hook uses; it gets one if it has none."""
    if (switch := _SWITCHES.get(model)) is None:
        switch = Switch(model)
        model.register_comm_hook(switch, switched_hook)
        _SWITCHES[model] = switch
    return switch


def register(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    """Register a hook, by a model's switch where it has one."""
    if (switch := _SWITCHES.get(model)) is None:
        model.register_comm_hook(state, hook)
        return
    if name := attached_hook(model):
        raise GradlabError(f"the DDP model has the communication hook {name} already, and DDP takes one only")
    switch.given = state, hook
