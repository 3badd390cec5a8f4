"""A step of a plan, once for all drivers: the replay, DDP's engine, and hooks that drive it inline."""

from typing import TYPE_CHECKING

from gradlab.lazy import lazy_names

if TYPE_CHECKING:
    from gradlab.executor.lockstep_plan import GroupCost, LockstepPlan, StepResult
    from gradlab.executor.step import PlanRun, RunSettings, Step
    from gradlab.executor.ticks import Ticks

__all__ = ["GroupCost", "LockstepPlan", "PlanRun", "RunSettings", "Step", "StepResult", "Ticks"]

_LOCKSTEP = dict.fromkeys(("GroupCost", "LockstepPlan", "StepResult"), "gradlab.executor.lockstep_plan")
_STEP = dict.fromkeys(("PlanRun", "RunSettings", "Step"), "gradlab.executor.step")
__getattr__, __dir__ = lazy_names(__name__, {**_LOCKSTEP, **_STEP, "Ticks": "gradlab.executor.ticks"})
