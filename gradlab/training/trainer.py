"""The reference trainer: one rank under torchrun, or emulated nodes, of which one process plays all.

Everything that could differ between a recorded run and a compressed one follows from the seed: the model, the order
of the data, the augmentation. So two runs differ only by what is done to the gradients. Every emulated node has the
samples and the random draws of the rank whose part it plays, so that a recording with --emulate N holds what a
recording with --ranks N holds (to the order in which DDP's backend adds, at N > 2).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.artifact import Artifact
from gradlab.capture import EmulatedNodes, TraceRecorder
from gradlab.codec import seeded_generator
from gradlab.datasets import Data, Recipe, Workload, batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.ddp.groups import Ranks
from gradlab.errors import GradlabError
from gradlab.plan.optimizer_rules import applied_by, residual_fades, wrapper_that
from gradlab.progress import Progress
from gradlab.runtime import CompressionState, ScalarLog, compression_hook
from gradlab.training.report import RankOutcome, Report, header, measured
from gradlab.training.settings import TrainSettings

_EVALUATIONS = 8  # times at which a run's model is tested


@dataclass
class Player:
    """One rank: its samples, its random draws, and what was measured of it."""

    rank: int
    order: Iterator[torch.Tensor]
    generator: torch.Generator
    outcome: RankOutcome = field(default_factory=RankOutcome)


@dataclass
class Run:
    """The ranks of a run that this process is or plays."""

    workload: Workload
    recipe: Recipe
    data: Data
    model: nn.Module
    optimizer: torch.optim.Optimizer
    players: Sequence[Player]
    recorder: TraceRecorder | None = None
    nodes: EmulatedNodes | None = None

    def step(self, step: int) -> None:
        """Make one optimizer step; keep its time, which is that of all players in turn, and its losses."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(self.recipe, step)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        losses = [self._pass(player) for player in self.players]
        if self.nodes is not None:
            self.nodes.average()
        clip_gradients(self.recipe, self.model.parameters())
        self.optimizer.step()
        seconds = time.perf_counter() - start
        for player, loss in zip(self.players, losses, strict=True):
            player.outcome.step_seconds.append(seconds)
            player.outcome.losses.append(float(loss))

    def _pass(self, player: Player) -> torch.Tensor:
        indices, recorder = next(player.order), self.nodes or self.recorder
        inputs = self.workload.augment(self.data.train_x[indices], player.generator)
        with nullcontext() if self.nodes is None else self.nodes.node(player.rank):
            loss = self.workload.loss(self.model(inputs), self.data.train_y[indices])
            loss.backward()
            if recorder is not None:
                recorder.annotate(loss=loss.detach())
        return loss.detach()

    def train(self, then: Callable[[int], None]) -> None:
        """Make all steps, and score the model now and then. then: called after each step with its number from 1."""
        steps = self.recipe.steps
        for step in range(1, steps + 1):
            self.step(step - 1)
            if step % max(1, steps // _EVALUATIONS) == 0 or step == steps:
                self._evaluate(step)
            then(step)

    def _evaluate(self, step: int) -> None:
        """Score rank 0's model on test data; the others wait, so that it does not count as their step."""
        first = self.players[0]
        if first.rank == 0:
            model = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
            samples = None if step == self.recipe.steps else self.workload.interim_samples
            score = self.workload.score(model, self.data.test_x[:samples], self.data.test_y[:samples])
            first.outcome.scores.append((step, score))
        if self.nodes is None:
            dist.barrier()

    @property
    def dense_payload_bytes(self) -> int:
        return 4 * sum(parameter.numel() for parameter in self.model.parameters())


def _run(settings: TrainSettings, ranks: Sequence[int]) -> Run:
    """Make the model, the data, and the players of these ranks."""
    torch.set_num_threads(settings.threads)
    workload = get(settings.workload)
    recipe = settings.applied_to(workload.recipe)
    if settings.artifact:
        recipe = without_what_the_plan_does(recipe, settings.artifact)
    data = workload.load(settings.data, train_limit=settings.train_limit)
    samples, seed = len(data.train_x), settings.seed
    players = [
        Player(
            rank,
            batches(samples, recipe.batch_size, rank, settings.ranks, seed, recipe.steps),
            seeded_generator("augmentation", seed, rank),
        )
        for rank in ranks
    ]
    model: nn.Module = workload.model(seed)
    if not settings.emulate:
        model = DistributedDataParallel(model, bucket_cap_mb=settings.bucket_cap_mb)
    return Run(workload, recipe, data, model, build_optimizer(recipe, model.parameters()), players)


def _recording(settings: TrainSettings, run: Run) -> dict[str, Any]:
    """Arguments of both kinds of recorders."""
    metadata = {"workload": settings.workload, "seed": settings.seed, "batch_size": run.recipe.batch_size}
    options = {"every": settings.every, "budget": settings.budget, "expected_steps": run.recipe.steps}
    return {"optimizer": run.optimizer, "metadata": metadata, **options}


def without_what_the_plan_does(recipe: Recipe, artifact: str) -> Recipe:
    """The recipe without what a plan does itself: SGD's momentum and weight decay, or all of Adam.

    A plan that cannot be read is refused later, by all ranks alike.
    """
    try:
        plan = Artifact.load(artifact).plan
    except GradlabError:
        return recipe
    if wrapper_that(plan, "replaces_optimizer"):  # what would be clipped are updates
        return replace(recipe, optimizer="sgd", momentum=0.0, nesterov=False, clip_norm=None)
    if recipe.optimizer != "sgd":  # its momentum is no setting that a plan's replaces: refused if both apply it
        return recipe
    momentum, decay = applied_by(plan)
    if momentum or residual_fades(plan):
        recipe = replace(recipe, momentum=0.0, nesterov=False)
    return replace(recipe, weight_decay=0.0) if decay else recipe


def emulate(settings: TrainSettings, progress: Progress | None = None) -> Report:
    """Train and record all ranks in this process. The report has one entry of `recorded`, for all nodes."""
    settings.check()
    run = _run(settings, range(settings.ranks))
    assert settings.capture is not None  # the settings were checked
    recording = _recording(settings, run)
    with EmulatedNodes(run.model, settings.capture, settings.ranks, seed=settings.seed, **recording) as run.nodes:
        run.train(lambda step: progress(settings.name, step, run.recipe.steps) if progress else None)
    outcomes = [player.outcome for player in run.players]
    outcomes[0].recorder = run.nodes.close()
    dense = run.dense_payload_bytes
    return {**header(settings, run.recipe, dense, None), **measured(outcomes, dense, run.workload.metric)}


def run_rank(settings: TrainSettings) -> Report:
    """Train on this rank, in a process group that is up; returns the run's report, on every rank."""
    run = _run(settings, [dist.get_rank()])
    outcome, state, log = run.players[0].outcome, None, None
    with ExitStack() as exits:
        if settings.capture:
            run.recorder = TraceRecorder(run.model, settings.capture, **_recording(settings, run))
            exits.enter_context(run.recorder)
            if settings.budget is not None:
                say(note=f"recording {settings.capture}: {run.recorder.size}")
        if settings.artifact:
            state = exits.enter_context(_compression(settings, run))
        if settings.log:
            log = exits.enter_context(ScalarLog(settings.log))

        def then(step: int) -> None:
            if log is not None:
                log.add(state, loss=outcome.losses[-1])
            say(step=step, steps=run.recipe.steps)

        run.train(then)
        if state is not None:
            outcome.records = list(state.statistics.steps)
    if run.recorder is not None:
        outcome.recorder = run.recorder.close()
    dense = run.dense_payload_bytes
    outcomes = [RankOutcome.from_json(one) for one in gather_json(asdict(outcome))]
    found = measured(outcomes, dense, run.workload.metric)
    if state is None:
        return {**header(settings, run.recipe, dense, None), **found}
    compressed = state.report()
    about = {name: compressed[name] for name in ("residuals", "rules")}
    if settings.trace_steps:
        about["chrome_trace"] = [event for events in gather_json(state.chrome_trace()) for event in events]
    return {**header(settings, run.recipe, dense, state.plan), **about, **found}


def _compression(settings: TrainSettings, run: Run) -> CompressionState:
    assert settings.artifact is not None
    assert isinstance(run.model, DistributedDataParallel)
    state = CompressionState.load(
        settings.artifact,
        run.model,
        optimizer=run.optimizer,
        deterministic=settings.deterministic,
        measure_every=1,
        trace_steps=settings.trace_steps,
        history=run.recipe.steps,
    )
    run.model.register_comm_hook(state, compression_hook)
    return state


def gather_json(value: Any) -> list[Any]:
    """Every rank's plain JSON value (NaN allowed), in rank order, on every rank."""
    assert dist.group.WORLD is not None
    return [json.loads(text) for text in Ranks(dist.group.WORLD, torch.device("cpu")).gather(json.dumps(value))]


def say(**line: Any) -> None:
    """Write a line of JSON for the launcher; from rank 0 only."""
    if dist.get_rank() == 0:
        _write(line)


def _write(line: dict[str, Any]) -> None:
    # One write call: lines of several ranks on one pipe must not run into each other.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> NoReturn:
    """Entry point of one rank: settings as JSON in the first argument. Bad input exits with 2, said by one rank."""
    settings = TrainSettings.from_json(sys.argv[1])
    dist.init_process_group("gloo")
    try:
        say(result=run_rank(settings))
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
