"""Plans that a pilot tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradlab.analysis.forecast.candidates import HALF_PLAN, usual_plans
from gradlab.artifact import Artifact
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.plan.plan import check_model
from gradlab.trace import Trace

_START = 10  # dense steps before plans that begin with none


@dataclass(frozen=True)
class ChosenPlans:
    """Plans to try by name, why others were refused, the artifacts of some, the recording's hash and metadata."""

    plans: Mapping[str, Plan]
    refused: Mapping[str, str]
    artifacts: Mapping[str, Artifact]
    trace: str
    recorded: Mapping[str, Any]

    @property
    def warmup_steps(self) -> int:
        """Dense steps that the plans begin with, as they were judged behind them."""
        own = (plan.schedule.warmup_steps for plan in self.plans.values())
        return max(own) or _START

    def provenance(self, name: str) -> dict[str, Any]:
        """The origin of a plan."""
        artifact = self.artifacts.get(name)
        return {"method": "uniform", "trace": self.trace} if artifact is None else artifact.provenance


def chosen_plans(trace: Trace, artifacts: Mapping[str, Artifact]) -> ChosenPlans:
    """Choose the plans that go with a recording's model and optimizer.

    Args:
        trace: the recording.
        artifacts: plans to choose from, by name. Without any they are those of `gradlab recommend` but 16 bits, which
            a pilot tries anyway.

    Raises:
        GradlabError: if a plan is of another model, or no plan goes with the optimizer.
    """
    usual = {name: plan for name, plan in usual_plans(trace.model_layers).items() if name != HALF_PLAN}
    plans = {name: artifact.plan for name, artifact in artifacts.items()} or usual
    optimizer = OptimizerSettings.from_metadata(trace.metadata)
    refused = {}
    for name, plan in plans.items():
        check_model(plan, trace.model_layers)
        if optimizer is not None and (conflict := conflict_of(plan, optimizer)):
            refused[name] = str(conflict)
    left = {name: plan for name, plan in plans.items() if name not in refused}
    if not left:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise GradlabError(f"{trace.path}: no plan to try{why and ': ' + why}")
    return ChosenPlans(left, refused, artifacts, trace.digest, trace.metadata)
