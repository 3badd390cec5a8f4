"""A step of a plan, once for all drivers: the replay, DDP's engine, and hooks that drive it inline."""

from gradlab.executor.lockstep_plan import GroupCost, LockstepPlan, StepResult
from gradlab.executor.step import PlanRun, RunSettings, Step
from gradlab.executor.ticks import Ticks

__all__ = ["GroupCost", "LockstepPlan", "PlanRun", "RunSettings", "Step", "StepResult", "Ticks"]
