"""Count steps whose gradients were not finite, and end a run that has too many of them.

The first one is a matter of `gradlab.runtime.engine.rules`.
"""

from __future__ import annotations

from gradlab.errors import GradlabError
from gradlab.executor import PlanRun
from gradlab.executor.rules import state_overflows
from gradlab.runtime.engine.statistics import StepRecord


class NonFiniteSteps:
    """Counts steps in a row whose gradients were not finite on some rank; `limit` of them end the run.

    scaled: whether a loss scaler is in use, which makes a few of them normal.
    """

    def __init__(self, limit: int, scaled: bool) -> None:
        self.limit = limit
        self.scaled = scaled
        self.in_a_row = 0

    def add(self, record: StepRecord, run: PlanRun) -> None:
        """Count a step; raise after too many in a row. The run's states may be why."""
        self.in_a_row = 0 if record.finite else self.in_a_row + 1
        if record.finite:
            return
        where = ", ".join(record.non_finite_layers[:3]) or "another rank"
        if self.in_a_row >= self.limit:
            if run.overflows and (one := state_overflows(record.step, run.overflows, run.largest_state())) is not None:
                raise GradlabError(f"{one.seen}; {one.remedy}")
            scale = f"the loss scale is {record.loss_scale:g}" if self.scaled else "there is no loss scaler"
            raise GradlabError(
                f"gradients were not finite in {self.in_a_row} steps in a row (now in {where}; {scale}): the run does "
                "not recover; look at the loss, the learning rate, and the first step at which this began"
            )
