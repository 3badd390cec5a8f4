"""Plans that a pilot tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.analysis.forecast.candidates import HALF_PLAN, usual_plans
from gradlab.artifact import Artifact
from gradlab.cli.named_method import loaded_plans
from gradlab.cli.pilot.trials import DENSE, HALF
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.plan.plan import check_model
from gradlab.trace import Trace

_START = 10  # dense steps before plans that begin with none


def plans_to_try(trace: Trace) -> dict[str, Plan]:
    """List the plans that `gradlab recommend` chooses from, without 16 bits, which a pilot tries anyway."""
    return {name: plan for name, plan in usual_plans(trace.model_layers).items() if name != HALF_PLAN}


@dataclass(frozen=True)
class ChosenPlans:
    """Plans to try by name, why others were refused, the artifacts of some, and the recording's hash."""

    plans: Mapping[str, Plan]
    refused: Mapping[str, str]
    artifacts: Mapping[str, Artifact]
    trace: str

    @property
    def warmup_steps(self) -> int:
        """Dense steps that the plans begin with, as they were judged behind them."""
        own = (plan.schedule.warmup_steps for plan in self.plans.values())
        return max(own) or _START

    def provenance(self, name: str) -> dict[str, Any]:
        """The origin of a plan."""
        artifact = self.artifacts.get(name)
        return {"method": "uniform", "trace": self.trace} if artifact is None else artifact.provenance


def chosen_plans(trace: Trace, paths: Sequence[Path]) -> ChosenPlans:
    """Choose the plans that go with a recording's model and optimizer: of these artifacts, or of `plans_to_try`."""
    artifacts = loaded_plans(paths, taken=(DENSE, HALF))
    plans = {name: artifact.plan for name, artifact in artifacts.items()} or plans_to_try(trace)
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
    return ChosenPlans(left, refused, artifacts, trace.digest)
