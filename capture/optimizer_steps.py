"""Count the optimizer steps of a run that is recorded: several synchronised backward passes may come between two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradlab.ddp.optimizer_steps import at_each_step
from gradlab.executor.rules import several_passes

UNKNOWN = -1


class StepCount:
    """Counts optimizer steps beside synchronised backward passes.

    A step that a loss scaler skipped counts too: its scale is smaller afterwards.

    Args:
        optimizers: bare; none: nothing is known.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._steps = self._passes = self._several = 0
        self._most = 0
        self._scale: float | None = None  # of the last pass
        self._handles = at_each_step(optimizers, self._stepped)

    @property
    def is_open(self) -> bool:
        """Whether no step has followed the last pass."""
        return self._passes > 0

    def begin_pass(self, scale: float | None = None) -> int:
        """Count a synchronised backward pass, at its beginning.

        Args:
            scale: the loss scaler's; None: none is in use, or it was not read. It counts where a pass is open.

        Returns:
            The optimizer step that its gradient is for, from 0; `UNKNOWN` without an optimizer whose steps are seen.
        """
        if not self._handles:
            return UNKNOWN
        if scale is not None:
            if self._scale is not None and scale < self._scale:
                self._stepped()
            self._scale = scale
        self._passes += 1
        return self._steps

    def remark(self) -> str:
        """Say that several passes came for one step, in every second step or more; "" if they did not."""
        return several_passes(self._most) if self._several > 1 and 2 * self._several >= self._steps else ""

    def close(self) -> None:
        """Stop counting. Idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def _stepped(self, *optimizer: object) -> None:
        if self._passes:
            self._steps += 1
            self._several += self._passes > 1
            self._most = max(self._most, self._passes)
            self._passes = 0
