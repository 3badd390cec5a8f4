"""Local steps of a model that a framework has put in DDP over all ranks: DDP then averages within a worker alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.ddp.copies import Uncopied
from gradlab.ddp.optimizers import all_optimizers, load_states, saved_states
from gradlab.ddp.switch import register
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.runtime import checkpoint
from gradlab.runtime.outer.step import OuterStep, copied


class LocalSteps:
    """An `OuterStep` beside a framework's training loop, and what a checkpoint of every rank has to hold.

    A communication hook takes the place of DDP's average over all ranks: gradients stay each worker's. So do buffers.
    Frameworks save the first rank's model and optimizer, but between outer steps every worker has its own.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: object,
        plan: Plan | str,
        *,
        within: object = None,
        **options: Any,
    ) -> None:
        self._model, self._optimizers = model, all_optimizers(optimizer)
        self.outer = OuterStep(plan, model.module, group=model.process_group, within=within, **options)
        try:
            register(model, _Inside(self.outer.workers.inside), _average_within)
        except (RuntimeError, GradlabError) as error:  # DDP takes one hook only
            self.outer.close()
            raise GradlabError(
                "local steps: the model has a communication hook already, and DDP takes one only; after a run that "
                "ended or failed make a new DDP model (with a framework, a new Trainer)"
            ) from error
        model.broadcast_buffers = False
        self._counted, group = 0, model.process_group
        self.identity: dict[str, Any] = {"rank": dist.get_rank(group), "world_size": dist.get_world_size(group)}

    def after(self, optimizer_steps: int) -> None:
        """Count what the framework has done. optimizer_steps: so far, of the whole run."""
        if optimizer_steps > self._counted:
            self.outer.step()
        self._counted = optimizer_steps

    # --- checkpoints: what `RankFiles` asks of a state ---

    @property
    def iteration(self) -> int:
        """Local steps taken."""
        return self.outer.local_steps

    def state_dict(self) -> dict[str, Any]:
        """Collect what this rank needs to go on: the outer step, its model and its optimizers."""
        own = {"model": self._model.module.state_dict(), "optimizer": saved_states(self._optimizers)}
        return checkpoint.sealed({**self.identity, **copied(own), "outer": self.outer.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of this rank and as many ranks."""
        checkpoint.require(state, self.identity)
        self._model.module.load_state_dict(state["model"])
        load_states(self._optimizers, state["optimizer"])
        self.outer.load_state_dict(state["outer"])

    def begins_after(self, optimizer_steps: int) -> None:
        """Take steps that a framework has restored for counted."""
        self._counted = optimizer_steps

    def load_state_dicts(self, states: object, residuals: str) -> None:
        """Refuse: between outer steps models of more or fewer workers cannot be told."""
        raise GradlabError("checkpoint: of local steps on another number of ranks, expected the same number")

    def close(self) -> None:
        """End the run; what is on its way arrives first."""
        self.outer.close()

    def __exit__(self, *error: Any) -> None:
        self.outer.__exit__(*error)


class _Inside(Uncopied):
    """The ranks of a worker, or None, as the state of DDP's hook: a copy of DDP has no use for it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group


def _average_within(inside, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with the classes
    """Average a bucket over the ranks of a worker; leave it as it is where that is one rank."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    if inside.group is None:
        future.set_result(bucket.buffer())
        return future
    bucket.buffer().div_(dist.get_world_size(inside.group))
    work = dist.all_reduce(bucket.buffer(), group=inside.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])
