"""The side of a trial that trains: the script's own gradlab lines take the trial's plan, log losses, and end the run.

Every way to train calls `torch.autograd.backward` with the loss: a plain loop, Lightning, Accelerate, the Trainer of
transformers. So that is where losses are seen, whether or not the script tells them to gradlab. It is wrapped in a
process of a trial alone.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.trial.losses import LossFile
from gradlab.trial.settings import VARIABLE, TrialSettings

_NEVER = 2**31  # steps in a row that are not finite: the command sees them in the losses


class Exchanging(Protocol):
    """A compression state, of which only the number of ranks and the records of its exchanges are read."""

    @property
    def run(self) -> Any: ...

    @property
    def statistics(self) -> Any: ...


def trial() -> Trial | None:
    """Return the trial that this process is of; None: it trains as usual.

    Raises:
        GradlabError: if the environment names a folder that holds no trial.
    """
    folder = os.environ.get(VARIABLE)
    return _trial(folder) if folder else None


@functools.cache
def _trial(folder: str) -> Trial:
    return Trial(Path(folder))


class Trial:
    """One run of the user's command under one plan, in one of its processes.

    Args:
        folder: folder of the trial.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._settings = folder, TrialSettings.load(folder)
        self._files: dict[int, LossFile] = {}  # by rank
        self._left = self._settings.steps
        self._pending: list[float] = []  # losses of this rank's backward passes since its last exchange

    @property
    def plan(self) -> Plan:
        """The plan to train with, whatever the script names."""
        return self._settings.plan

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the options of a compression state: NaN and rules are for the command to judge."""
        return {**given, "non_finite_limit": _NEVER, "rules": "ignore"}

    def follow(self, state: Exchanging, scaler: Any = None) -> None:
        """Log a loss for each exchange of a state, and end the process after the trial's steps.

        Args:
            state: just made.
            scaler: scaler of the losses, if one is in use.

        Raises:
            GradlabError: for a second one.
        """
        last = None
        between = state.run.world_size

        def after() -> None:
            nonlocal last
            steps = state.statistics.steps
            if steps and steps[-1] is not last:
                last = steps[-1]
                self.end()

        # Of one alone FSDP's reduce-scatter inside a node is compressed.
        self.count(between if between > 1 else dist.get_world_size(), scaler, after)

    def count(self, exchanging: int, scaler: Any = None, after: Callable[[], None] = lambda: None) -> None:
        """Log losses of this rank. `end` says when a step is over.

        Args:
            exchanging: ranks between which the plan runs.
            scaler: scaler of the losses, if one is in use.
            after: is called after each backward pass.

        Raises:
            GradlabError: as `follow`.
        """
        self._begin([dist.get_rank()], dist.get_world_size(), exchanging, scaler, after)

    def end(self) -> None:
        """Log this rank's loss of a step, and count the step.

        Raises:
            SystemExit: see `end_step`.
        """
        self.end_rank(dist.get_rank())
        self.end_step()

    def emulate(self, ranks: int, scaler: Any = None) -> None:
        """Log losses of ranks that this process plays in turn. `end_rank` and `end_step` say when each has its own.

        Args:
            ranks: number of them.
            scaler: scaler of the losses, if one is in use.

        Raises:
            GradlabError: as `follow`.
        """
        self._begin(range(ranks), ranks, ranks, scaler, lambda: None)

    def end_rank(self, rank: int) -> None:
        """Log a rank's loss of a step: the sum of what its backward passes began with."""
        self._files[rank].add(sum(self._pending))
        self._pending.clear()

    def end_step(self) -> None:
        """Count a step.

        Raises:
            SystemExit: after the trial's last step, on all ranks.
        """
        self._left -= 1
        if self._left <= 0:
            if dist.is_available() and dist.is_initialized():
                dist.barrier()  # a rank that ends may cut others off from what it sent last
            sys.exit(0)

    def _begin(
        self, ranks: Iterable[int], world_size: int, exchanging: int, scaler: Any, after: Callable[[], None]
    ) -> None:
        if self._files:
            raise GradlabError("gradlab pilot: a second model is compressed or recorded; it tries plans on one")
        self._files = {rank: LossFile(self._folder, rank, world_size, exchanging) for rank in ranks}

        def seen(loss: float | None) -> None:
            scale = 1.0 if scaler is None else scaler.get_scale()
            self._pending += [] if loss is None else [loss / scale]
            after()

        _after_each_backward(seen)


def _after_each_backward(act: Callable[[float | None], None]) -> None:
    """Call a function after each backward pass, with the loss that it began with; None where that is no number."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
        original(tensors, *arguments, **named)
        several = [tensors] if torch.is_tensor(tensors) else list(tensors)
        act(sum(float(one.detach()) for one in several) if all(_is_loss(one) for one in several) else None)

    torch.autograd.backward = backward


def _is_loss(tensor: Any) -> bool:
    return torch.is_tensor(tensor) and tensor.numel() == 1
