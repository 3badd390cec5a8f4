"""What the reference trainer writes into a trace about the run that is recorded."""

from __future__ import annotations

from typing import Any

import torch

from gradlab.capture.residual_sums import layers_after_addition
from gradlab.cli.train.settings import TrainSettings
from gradlab.datasets import Data, Recipe, Workload

_SAMPLES = 2  # batch normalisation has no statistics of one


def trace_metadata(settings: TrainSettings, workload: Workload, recipe: Recipe, data: Data) -> dict[str, Any]:
    """Workload, seed, batch size per rank, and as "after_addition" the layers that read a residual sum.

    A trace's metadata is written before the run's first step. So these layers are seen in a pass of a model made for
    it, from the same seed, which leaves the run's model, its buffers and all generators as they are.
    """
    with torch.random.fork_rng(devices=[]):
        model = workload.model(settings.seed)
        output = model(data.train_x[:_SAMPLES])
    return {
        "workload": settings.workload,
        "seed": settings.seed,
        "batch_size": recipe.batch_size,
        "after_addition": list(layers_after_addition(output, model)),
    }
