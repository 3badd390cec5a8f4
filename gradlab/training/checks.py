"""Refusals before processes start, of runs that every rank would refuse."""

from __future__ import annotations

from pathlib import Path

import torch

from gradlab.artifact import Artifact
from gradlab.capture.writing.folder import require_free
from gradlab.codec.wrapper import innermost
from gradlab.datasets import Workload, build_optimizer, get
from gradlab.ddp.optimizers import describe_optimizer
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.learning.selection import LearnedSelection
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.plan.plan import check_model
from gradlab.training.settings import TrainSettings
from gradlab.training.trainer import without_what_the_plan_does


def require_ready(settings: TrainSettings) -> None:
    """Refuse a run whose settings were checked, and which cannot begin.

    Raises:
        GradlabError: if data is missing, the recording's folder is taken, or the plan does not fit the model, the ranks
            or the optimizer.
    """
    workload = get(settings.workload)
    if workload.needs_path and settings.data is None:
        workload.load(None)  # says what it expects
    if settings.capture is not None:
        require_free(Path(settings.capture), overwrite=False)
    if settings.artifact is not None:
        _require_trainable(settings, workload, settings.artifact)


def _require_trainable(settings: TrainSettings, workload: Workload, artifact: str) -> None:
    """Refuse a plan for other layers or ranks, or one that applies momentum or weight decay beside the optimizer."""
    plan: Plan = Artifact.load(artifact).plan
    check_model(plan, layers_of(workload.model(0)))
    for group in plan.compressed_groups:
        codec = innermost(plan.build(group))
        if isinstance(codec, LearnedSelection):
            codec.check_ranks(codec.learned.get("autoencoder"), settings.ranks)
    recipe = without_what_the_plan_does(settings.applied_to(workload.recipe), artifact)
    optimizer = describe_optimizer(build_optimizer(recipe, [torch.nn.Parameter(torch.zeros(1))]))
    if optimizer and (conflict := conflict_of(plan, optimizer)):
        raise GradlabError(f"{artifact}: {conflict}")
