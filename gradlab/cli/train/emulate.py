"""The reference trainer with emulated nodes: one process trains as N ranks would, and records all their gradients.

Every node has the samples and the random draws of the rank whose part it plays, so that a recording with --emulate N
holds what a recording with --ranks N holds (to the order in which DDP's backend adds, at N > 2).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gradlab.capture import EmulatedNodes, RecorderReport
from gradlab.cli.train.metadata import trace_metadata
from gradlab.cli.train.outcome import RankOutcome, TrainReport, run_header, run_report
from gradlab.cli.train.settings import EVALUATIONS, TrainSettings
from gradlab.codec import seeded_generator
from gradlab.datasets import Data, Recipe, Workload, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.progress import Progress


@dataclass
class EmulatedRun:
    """All nodes' run: the parts of the loop, and what was measured. generators, outcomes: one for each node."""

    workload: Workload
    recipe: Recipe
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    nodes: EmulatedNodes
    generators: Sequence[torch.Generator]
    outcomes: Sequence[RankOutcome]

    def step(self, step: int, indices: Sequence[torch.Tensor]) -> None:
        """Make one optimizer step from one micro-batch per node; every node's outcome gets the whole step's time."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.recipe, step)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        for rank, samples in enumerate(indices):
            self._pass(rank, samples)
        self.nodes.average()
        clip_gradients(self.recipe, self.model.parameters())
        self.optimizer.step()
        seconds = time.perf_counter() - start
        for outcome in self.outcomes:
            outcome.step_seconds.append(seconds)

    def _pass(self, rank: int, indices: torch.Tensor) -> None:
        inputs = self.workload.augment(self.data.train_x[indices], self.generators[rank])
        with self.nodes.node(rank):
            loss = self.workload.loss(self.model(inputs), self.data.train_y[indices])
            loss.backward()
            self.nodes.annotate(loss=loss)
        self.outcomes[rank].losses.append(float(loss.detach()))

    def evaluate(self, step: int) -> None:
        """Score the model with node 0's buffers; on all test samples after the last step."""
        samples = None if step == self.recipe.steps else self.workload.interim_samples
        score = self.workload.score(self.model, self.data.test_x[:samples], self.data.test_y[:samples])
        self.outcomes[0].scores.append((step, score))


def emulate(settings: TrainSettings, progress: Progress | None = None) -> TrainReport:
    """Train and record in this process.

    Returns:
        The run's report, as `launch` returns it. Its step_seconds is the time of all nodes' passes, one after another;
        `recorded` is one entry for all nodes.

    Raises:
        GradlabError: for settings, data or a folder that cannot be used; if the trace cannot be written.
    """
    settings.check()
    torch.set_num_threads(settings.threads)
    workload = get(settings.workload)
    recipe = settings.applied_to(workload.recipe)
    data = workload.load(settings.data, train_limit=settings.train_limit)
    ranks, samples = range(settings.ranks), len(data.train_x)
    orders = [batches(samples, recipe.batch_size, rank, len(ranks), settings.seed, recipe.steps) for rank in ranks]
    model = workload.model(settings.seed)
    optimizer = build_optimizer(recipe, model.parameters())
    metadata = trace_metadata(settings, workload, recipe, data)
    with _nodes(settings, metadata, model, optimizer, recipe.steps) as nodes:
        generators = [seeded_generator("augmentation", settings.seed, rank) for rank in ranks]
        outcomes = [RankOutcome() for _ in ranks]
        run = EmulatedRun(workload, recipe, data, model, optimizer, nodes, generators, outcomes)
        _train(run, zip(*orders, strict=True), settings.name, progress)
    return _report(settings, run, nodes.close())


def _nodes(
    settings: TrainSettings, metadata: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> EmulatedNodes:
    assert settings.capture is not None  # the settings were checked
    return EmulatedNodes(
        model,
        settings.capture,
        settings.ranks,
        optimizer=optimizer,
        every=settings.every,
        budget=settings.budget,
        expected_steps=steps,
        seed=settings.seed,
        metadata=metadata,
    )


def _train(run: EmulatedRun, order: Iterable[Sequence[torch.Tensor]], name: str, progress: Progress | None) -> None:
    steps = run.recipe.steps
    evaluate_every = max(1, steps // EVALUATIONS)
    for step, indices in enumerate(order, start=1):
        run.step(step - 1, indices)
        if step % evaluate_every == 0 or step == steps:
            run.evaluate(step)
        if progress:
            progress(name, step, steps)


def _report(settings: TrainSettings, run: EmulatedRun, recorded: RecorderReport) -> TrainReport:
    dense = 4 * sum(parameter.numel() for parameter in run.model.parameters())
    run.outcomes[0].recorder = recorded
    header = run_header(settings, run.recipe, dense, plan=None)
    return TrainReport(header, run_report(run.outcomes, dense, run.workload.metric))
