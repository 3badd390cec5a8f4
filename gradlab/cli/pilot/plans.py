"""Which plans a pilot tries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.analysis.forecast.candidates import HALF_PLAN, usual_plans
from gradlab.artifact import Artifact
from gradlab.cli.pilot.trials import DENSE, HALF
from gradlab.ddp.optimizers import OptimizerSettings
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.trace import Trace

_START = 10  # dense steps before plans that begin with none


def plans_to_try(trace: Trace) -> dict[str, Plan]:
    """List the plans that `gradlab recommend` chooses from, without 16 bits, which a pilot tries anyway.

    Args:
        trace: the recording.

    Returns:
        Plans by name.
    """
    return {name: plan for name, plan in usual_plans(trace.model_layers).items() if name != HALF_PLAN}


@dataclass(frozen=True)
class ChosenPlans:
    """What a pilot tries.

    Attributes:
        plans: by name.
        refused: why others cannot train with the recording's optimizer, by name.
        artifacts: that some of the plans are from.
        trace: hash of the recording.
    """

    plans: Mapping[str, Plan]
    refused: Mapping[str, str]
    artifacts: Mapping[str, Artifact]
    trace: str

    @property
    def warmup_steps(self) -> int:
        """Dense steps before a pilot: those that the plans begin with, as they were judged behind them."""
        own = (plan.schedule.warmup_steps for plan in self.plans.values())
        return max(own) or _START

    def provenance(self, name: str) -> dict[str, Any]:
        """Return what an artifact says of where a plan is from."""
        artifact = self.artifacts.get(name)
        return {"method": "uniform", "trace": self.trace} if artifact is None else artifact.provenance


def chosen_plans(trace: Trace, paths: Sequence[Path]) -> ChosenPlans:
    """Choose the plans that go with a recording's model and optimizer.

    Args:
        trace: the recording.
        paths: of artifacts; none: those of `plans_to_try`.

    Raises:
        GradlabError: for an artifact that cannot be read or is of another model, or if no plan is left.
    """
    stems = len({path.stem for path in paths} | {DENSE, HALF}) == len(paths) + 2
    artifacts = {path.stem if stems else str(path): Artifact.load(path) for path in paths}
    plans = {name: artifact.plan for name, artifact in artifacts.items()} or plans_to_try(trace)
    optimizer = OptimizerSettings.from_metadata(trace.metadata)
    refused = {}
    for name, plan in plans.items():
        plan.check_model(trace.model_layers)
        if optimizer is not None and (conflict := conflict_of(plan, optimizer)):
            refused[name] = str(conflict)
    left = {name: plan for name, plan in plans.items() if name not in refused}
    if not left:
        why = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise GradlabError(f"{trace.path}: no plan to try{why and ': ' + why}")
    return ChosenPlans(left, refused, artifacts, trace.digest)
