"""The reference trainer with local steps: one process plays N workers that exchange what H steps add up to.

Each worker has a model and an optimizer of its own, and the samples and random draws of the rank whose part it plays.
After H steps of each, the mean of their pseudo-gradients moves the common parameters by SGD with Nesterov momentum, as
in `gradlab.runtime.OuterStep` without fragments and delay. What is exchanged is recorded (one step of the trace is an
outer step), or goes through a plan, by the very code that later trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch
from torch import nn

from gradlab.artifact import Artifact
from gradlab.capture import EmulatedNodes
from gradlab.cli.train.metadata import trace_metadata
from gradlab.cli.train.outcome import RankOutcome, TrainReport, run_header, run_report
from gradlab.cli.train.settings import EVALUATIONS, TrainSettings
from gradlab.codec import Tensors, seeded_generator
from gradlab.codec.measures import all_finite, contribution_error
from gradlab.collectives import sum_in_rank_order
from gradlab.datasets import Data, Recipe, Workload, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.ddp.optimizers import describe_optimizer
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import named_layers
from gradlab.plan import Plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.progress import Progress
from gradlab.runtime.engine.statistics import StepRecord

# Replaces workers' pseudo-gradients, by worker and layer, by what the common parameters are moved along.
Combine = Callable[[Sequence[Tensors], Sequence[float]], Tensors]


@dataclass
class Worker:
    """One worker: what differs between them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    order: Iterator[torch.Tensor]
    generator: torch.Generator
    outcome: RankOutcome = field(default_factory=RankOutcome)

    @torch.no_grad()
    def begin(self, common: Mapping[str, torch.Tensor]) -> None:
        """Start from the common parameters."""
        for name, parameter in _parameters(self.model).items():
            parameter.copy_(common[name])

    def train(
        self,
        workload: Workload,
        recipe: Recipe,
        data: Data,
        steps: range,
        exchange: Callable[[], object] = lambda: None,
    ) -> float:
        """Take local steps. exchange: called after each backward. Returns the mean loss."""
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate_at(recipe, step)
            indices = next(self.order)
            self.optimizer.zero_grad()
            inputs = workload.augment(data.train_x[indices], self.generator)
            loss = workload.loss(self.model(inputs), data.train_y[indices])
            loss.backward()
            exchange()
            clip_gradients(recipe, self.model.parameters())
            self.optimizer.step()
            self.outcome.losses.append(float(loss.detach()))
        return fmean(self.outcome.losses[-len(steps) :])

    @torch.no_grad()
    def pseudo_gradients(self, common: Mapping[str, torch.Tensor]) -> Tensors:
        """How far it has come: the common parameters less its own, by layer name."""
        return {name: common[name] - parameter for name, parameter in _parameters(self.model).items()}


def emulate_local_steps(settings: TrainSettings, progress: Progress | None = None) -> TrainReport:
    """Train in this process, plain, recorded or compressed.

    Args:
        settings: with `emulate` and `local_steps`. Steps are each worker's, as many as fill outer steps.
        progress: told of local steps.

    Returns:
        The run's report. Its losses are of local steps; times, bytes and errors are of outer steps.

    Raises:
        GradlabError: for settings, data or a folder that cannot be used; if the trace cannot be written.
    """
    settings.check()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    workload = get(settings.workload)
    asked = settings.steps or workload.recipe.steps
    if asked < settings.local_steps:
        raise GradlabError(f"{asked} steps are no outer step of {settings.local_steps}: give --steps more")
    settings = replace(settings, steps=asked // settings.local_steps * settings.local_steps)
    recipe = settings.applied_to(workload.recipe)
    data = workload.load(settings.data, train_limit=settings.train_limit)
    workers = [make_worker(settings, workload, recipe, data, rank) for rank in range(settings.ranks)]
    model = workload.model(settings.seed)  # of the common parameters
    outer = settings.outer_optimizer(model.parameters())
    plan = Artifact.load(settings.artifact).plan if settings.artifact else None
    described = describe_optimizer(outer)
    if plan is not None and described is not None and (conflict := conflict_of(plan, described)):
        raise GradlabError(f"outer optimizer: {conflict} (-s outer_momentum=0)")
    with _recording(settings, workload, recipe, data, model, outer) as nodes:
        if nodes is not None:
            combine = _recorder(nodes, model)
        elif plan is not None:
            combine = _exchange(plan, [worker.outcome for worker in workers])
        else:
            combine = _mean
        _train(settings, workload, recipe, data, workers, model, outer, combine, progress)
    if nodes is not None:
        workers[0].outcome.recorder = nodes.close()
    dense = 4 * sum(parameter.numel() for parameter in model.parameters())
    header = run_header(settings, recipe, dense, plan)
    return TrainReport(header, run_report([worker.outcome for worker in workers], dense, workload.metric))


def make_worker(settings: TrainSettings, workload: Workload, recipe: Recipe, data: Data, rank: int) -> Worker:
    """Make the worker that plays one rank of a run, or is it."""
    model = workload.model(settings.seed)
    order = batches(len(data.train_x), recipe.batch_size, rank, settings.ranks, settings.seed, recipe.steps)
    generator = seeded_generator("augmentation", settings.seed, rank)
    return Worker(model, build_optimizer(recipe, model.parameters()), iter(order), generator)


def _train(
    settings: TrainSettings,
    workload: Workload,
    recipe: Recipe,
    data: Data,
    workers: Sequence[Worker],
    model: nn.Module,
    outer: torch.optim.Optimizer,
    combine: Combine,
    progress: Progress | None,
) -> None:
    every, common = settings.local_steps, _parameters(model)
    outer_steps = recipe.steps // every
    evaluate_every = max(1, outer_steps // EVALUATIONS)
    for number in range(outer_steps):
        pseudo, losses, began = [], [], time.perf_counter()
        for rank, worker in enumerate(workers):
            worker.begin(common)
            losses.append(worker.train(workload, recipe, data, range(number * every, (number + 1) * every)))
            pseudo.append(worker.pseudo_gradients(common))
            if progress:
                progress(settings.name, number * every + every * (rank + 1) // len(workers), outer_steps * every)
        means = combine(pseudo, losses)
        if all_finite(means.values()):  # else all go back to the common parameters
            for name, gradient in means.items():
                common[name].grad = gradient
            outer.step()
        outer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        for worker in workers:
            worker.outcome.step_seconds.append(seconds)
        last = number == outer_steps - 1
        if last or (number + 1) % evaluate_every == 0:
            _evaluate(workload, data, workers[0], common, (number + 1) * every, last)


def _evaluate(
    workload: Workload, data: Data, first: Worker, common: Mapping[str, torch.Tensor], step: int, last: bool
) -> None:
    """Score the common parameters with worker 0's buffers; on all test samples after the last step."""
    first.begin(common)
    samples = None if last else workload.interim_samples
    score = workload.score(first.model, data.test_x[:samples], data.test_y[:samples])
    first.outcome.scores.append((step, score))


def _recording(
    settings: TrainSettings,
    workload: Workload,
    recipe: Recipe,
    data: Data,
    model: nn.Module,
    outer: torch.optim.Optimizer,
) -> EmulatedNodes | nullcontext[None]:
    if not settings.capture:
        return nullcontext()
    inner = describe_optimizer(build_optimizer(recipe, [nn.Parameter(torch.zeros(1))]))
    local = {"steps": settings.local_steps, "optimizer": None if inner is None else inner.name}
    return EmulatedNodes(
        model,
        settings.capture,
        settings.ranks,
        optimizer=outer,
        every=settings.every,
        budget=settings.budget,
        expected_steps=recipe.steps // settings.local_steps,
        seed=settings.seed,
        metadata=trace_metadata(settings, workload, recipe, data) | {"local_steps": local},
    )


def _recorder(nodes: EmulatedNodes, model: nn.Module) -> Combine:
    """Record workers' pseudo-gradients as nodes' gradients; their mean is what nodes average."""
    parameters = _parameters(model)

    def combine(pseudo: Sequence[Tensors], losses: Sequence[float]) -> Tensors:
        for rank, (mine, loss) in enumerate(zip(pseudo, losses, strict=True)):
            with nodes.node(rank):
                for name, parameter in parameters.items():
                    parameter.grad = mine[name]
                nodes.annotate(loss=loss)
        nodes.average()
        return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}

    return combine


def _mean(pseudo: Sequence[Tensors], _: Sequence[float]) -> Tensors:
    return {name: sum_in_rank_order([own[name] for own in pseudo]) for name in pseudo[0]}


def _exchange(plan: Plan, outcomes: Sequence[RankOutcome]) -> Combine:
    """Exchange through a plan, all workers in lockstep, and note bytes and errors."""
    lockstep = LockstepPlan(plan, len(outcomes))

    def combine(pseudo: Sequence[Tensors], losses: Sequence[float]) -> Tensors:
        number = len(outcomes[0].records)
        result = lockstep.step(number, [dict(own) for own in pseudo])
        means = _mean(pseudo, losses)
        for rank, outcome in enumerate(outcomes):
            record = StepRecord(number, result.compressing, result.payload[rank], result.wire[rank])
            record.finite, record.compress_seconds = result.finite, result.codec_seconds / len(outcomes)
            for done in (ranks[rank] for ranks in result.exchanged.values()):
                record.errors |= contribution_error(done)
            outcome.records.append(record)
        for ranks in result.exchanged.values():
            means |= ranks[0].mean
        return means

    return combine


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {layer.name: parameter for layer, parameter in named_layers(model)}
