"""The reference trainer: one rank under torchrun. Prints progress and its outcome as lines of JSON on rank 0.

Everything that could differ between a recorded run and a compressed one follows from the seed: the model, the order
of the data, the augmentation. So two runs differ only by what is done to the gradients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.artifact import Artifact
from gradlab.capture import TraceRecorder
from gradlab.cli.train.metadata import trace_metadata
from gradlab.cli.train.outcome import RankOutcome, TrainReport, run_header, run_report
from gradlab.cli.train.settings import EVALUATIONS, TrainSettings
from gradlab.codec import seeded_generator
from gradlab.datasets import Data, Recipe, Workload, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.ddp.agreement import Ranks
from gradlab.errors import GradlabError
from gradlab.runtime import CompressionState, ScalarLog, compression_hook


@dataclass
class Rank:
    """One rank's run: the parts of the loop, and what was measured."""

    settings: TrainSettings
    workload: Workload
    recipe: Recipe
    data: Data
    model: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    recorder: TraceRecorder | None = None
    state: CompressionState | None = None
    log: ScalarLog | None = None
    outcome: RankOutcome = field(default_factory=RankOutcome)

    def step(self, step: int, indices: torch.Tensor) -> None:
        """Make one optimizer step; keep its time and its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.recipe, step)
        start = time.perf_counter()
        inputs = self.workload.augment(self.data.train_x[indices], self.generator)
        self.optimizer.zero_grad()
        loss = self.workload.loss(self.model(inputs), self.data.train_y[indices])
        loss.backward()
        if self.recorder is not None:
            self.recorder.annotate(loss=loss.detach())
        clip_gradients(self.recipe, self.model.parameters())
        self.optimizer.step()
        self.outcome.step_seconds.append(time.perf_counter() - start)
        self.outcome.losses.append(float(loss.detach()))

    def evaluate(self, step: int) -> None:
        """Score rank 0's model on test data; the others wait, so that it does not count as their step."""
        if dist.get_rank() == 0:
            samples = None if step == self.recipe.steps else self.workload.interim_samples
            score = self.workload.score(self.model.module, self.data.test_x[:samples], self.data.test_y[:samples])
            self.outcome.scores.append((step, score))
        dist.barrier()


def _prepare(settings: TrainSettings, exits: ExitStack) -> Rank:
    workload = get(settings.workload)
    recipe = settings.applied_to(workload.recipe)
    if settings.artifact:
        recipe = without_what_the_plan_does(recipe, settings.artifact)
    data = workload.load(settings.data, train_limit=settings.train_limit)
    model = DistributedDataParallel(workload.model(settings.seed), bucket_cap_mb=settings.bucket_cap_mb)
    optimizer = build_optimizer(recipe, model.parameters())
    generator = seeded_generator("augmentation", settings.seed, dist.get_rank())
    rank = Rank(settings, workload, recipe, data, model, optimizer, generator)
    if settings.capture:
        metadata = trace_metadata(settings, workload, recipe, data)
        rank.recorder = exits.enter_context(
            TraceRecorder(
                model,
                settings.capture,
                optimizer=optimizer,
                every=settings.every,
                metadata=metadata,
                budget=settings.budget,
                expected_steps=recipe.steps,
            )
        )
        if settings.budget is not None:
            say(note=f"recording {settings.capture}: {rank.recorder.size}")
    if settings.artifact:
        rank.state = exits.enter_context(
            CompressionState.load(
                settings.artifact,
                model,
                optimizer=optimizer,
                deterministic=settings.deterministic,
                measure_every=1,
                trace_steps=settings.trace_steps,
                history=recipe.steps,
            )
        )
        model.register_comm_hook(rank.state, compression_hook)
    if settings.log:
        rank.log = exits.enter_context(ScalarLog(settings.log))
    return rank


def without_what_the_plan_does(recipe: Recipe, artifact: str) -> Recipe:
    """The recipe without what a plan does itself: SGD's momentum and weight decay, or all of Adam.

    A plan that cannot be read is refused later, by all ranks alike.
    """
    try:
        plan = Artifact.load(artifact).plan
    except GradlabError:
        return recipe
    if plan.replaces_optimizer:  # what would be clipped are updates
        return replace(recipe, optimizer="sgd", momentum=0.0, nesterov=False, clip_norm=None)
    if recipe.optimizer != "sgd":  # its momentum is no setting that a plan's replaces: refused if both apply it
        return recipe
    if plan.applies_momentum or plan.residual_is_momentum:
        recipe = replace(recipe, momentum=0.0, nesterov=False)
    return replace(recipe, weight_decay=0.0) if plan.applies_weight_decay else recipe


def _train(rank: Rank) -> None:
    recipe, settings = rank.recipe, rank.settings
    order = batches(
        len(rank.data.train_x), recipe.batch_size, dist.get_rank(), settings.ranks, settings.seed, recipe.steps
    )
    evaluate_every = max(1, recipe.steps // EVALUATIONS)
    for step, indices in enumerate(order):
        rank.step(step, indices)
        if (step + 1) % evaluate_every == 0 or step + 1 == recipe.steps:
            rank.evaluate(step + 1)
        if rank.log is not None:
            rank.log.add(rank.state, loss=rank.outcome.losses[-1])
        say(step=step + 1, steps=recipe.steps, loss=rank.outcome.losses[-1])


def gather_json(value: Any) -> list[Any]:
    """Every rank's plain JSON value (NaN allowed), in rank order, on every rank."""
    assert dist.group.WORLD is not None
    return [json.loads(text) for text in Ranks(dist.group.WORLD, torch.device("cpu")).gather(json.dumps(value))]


def say(**line: Any) -> None:
    """One line of JSON for the launcher; from rank 0 only."""
    if dist.get_rank() == 0:
        _write(line)


def _write(line: dict[str, Any]) -> None:
    # One write call: lines of several ranks on one pipe must not run into each other.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def run_rank(settings: TrainSettings) -> TrainReport:
    """Train on this rank, in a process group that is up; returns the run's report, on every rank."""
    torch.set_num_threads(settings.threads)
    with ExitStack() as exits:
        rank = _prepare(settings, exits)
        _train(rank)
        if rank.state is not None:
            rank.outcome.records = list(rank.state.statistics.steps)
    if rank.recorder is not None:
        rank.outcome.recorder = rank.recorder.close()
    dense = 4 * sum(parameter.numel() for parameter in rank.model.module.parameters())
    outcomes = [RankOutcome.from_json(outcome) for outcome in gather_json(asdict(rank.outcome))]
    measured = run_report(outcomes, dense, rank.workload.metric)
    if rank.state is None:
        return TrainReport(run_header(settings, rank.recipe, dense, plan=None), measured)
    spans = gather_json(rank.state.chrome_trace()) if settings.trace_steps else None
    compressed = rank.state.run_report()
    return TrainReport(
        header=run_header(settings, rank.recipe, dense, rank.state.plan),
        measured=measured,
        residuals=compressed.residuals,
        rules=compressed.rules,
        chrome_trace=None if spans is None else [event for events in spans for event in events],
    )


def main() -> NoReturn:
    """Entry point of one rank: settings as JSON in the first argument. Bad input exits with 2, said by one rank."""
    settings = TrainSettings.from_json(sys.argv[1])
    dist.init_process_group("gloo")
    try:
        say(result=run_rank(settings).to_json())
        code = 0
    except GradlabError as error:
        # Any rank may be the one that noticed; the launcher shows the first line it gets.
        _write({"error": str(error), "rank": dist.get_rank()})
        code = 2
    if not code:  # else other ranks may wait in a collective: an orderly shutdown would wait with them
        dist.destroy_process_group()
    sys.stdout.flush()
    # Not through the interpreter's end: Gloo's threads ask for Python's lock after a collective, and before Python 3.14
    # asking while the interpreter ends aborts the process (plain DDP's too). DDP keeps those threads beyond the group.
    os._exit(code)


if __name__ == "__main__":
    main()
