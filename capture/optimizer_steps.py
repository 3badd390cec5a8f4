"""Count the optimizer steps of a run that is recorded: several synchronised backward passes may come between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlab.ddp.copies import take_away
from gradlab.ddp.optimizer_steps import LocalPasses, at_each_step
from gradlab.executor.rules import LOCAL_GRADIENTS, RULES, several_passes

UNKNOWN = -1


class StepCount:
    """Counts optimizer steps beside synchronised backward passes; without optimizers nothing is known.

    A step that a loss scaler skipped counts too: its scale is smaller afterwards. Without parameters, passes that DDP
    does not average are not looked for.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[torch.Tensor] = ()) -> None:
        self._steps = self._passes = self._several = 0
        self._local = LocalPasses(parameters)
        self._met = self._applied_local = False
        self._most = 0
        self._scale: float | None = None  # of the last pass
        self._handles = at_each_step(optimizers, self._stepped)

    @property
    def is_open(self) -> bool:
        """Whether no step has followed the last pass."""
        return self._passes > 0

    def begin_pass(self, scale: float | None = None) -> int:
        """Count a synchronised backward pass at its beginning; return the optimizer step that its gradient is for.

        Steps count from 0; `UNKNOWN` without an optimizer whose steps are seen.
        """
        self._met = True
        if not self._handles:
            return UNKNOWN
        if scale is not None:
            if self._scale is not None and scale < self._scale:
                self._stepped()
            self._scale = scale
        self._passes += 1
        return self._steps

    def end_pass(self) -> None:
        """Note that DDP has handed over all gradients of a synchronised backward pass."""
        self._local.exchanged()

    def remarks(self, closing: bool = False) -> dict[str, str]:
        """Say what is wrong, with what to do, by rule: several passes for every second step or more, and local ones."""
        found = {}
        if self._several > 1 and 2 * self._several >= self._steps:
            found["several_backwards"] = several_passes(self._most)
        if self._applied_local:
            found["local_gradients"] = f"{LOCAL_GRADIENTS}, and the trace holds none of these"
        if closing and not self._met and self._local.unaveraged:
            found["local_gradients"] = "nothing was recorded, as DDP averaged in none of the backward passes"
        return {name: f"{remark}; {RULES[name]}" for name, remark in found.items()}

    def close(self) -> None:
        """Stop counting. Idempotent."""
        self._local.close()
        take_away(self._handles)

    def _stepped(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        if not self._applied_local and optimizer is not None:
            self._applied_local = self._local.applied_by(optimizer)
        if self._passes:
            self._steps += 1
            self._several += self._passes > 1
            self._most = max(self._most, self._passes)
            self._passes = 0
