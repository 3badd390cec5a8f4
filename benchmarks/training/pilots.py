"""From a pilot to the end of training: plans begun at three places of trainings that nobody tuned them to.

    python benchmarks pilots train --data FOLDER --rows FILE [--tasks ViT LSTM ...] [--seeds 0 1]
    python benchmarks pilots digest --rows FILE [FILE ...]

`train`: every task of pilot_tasks.py trains densely. At a tenth, four tenths and three quarters of its steps every plan
begins from the dense run's snapshot and trains to the end on the same batches: its first steps are its pilot. A row
holds both runs' losses. The gradients of the first steps are recorded, and each plan is replayed on them. N ranks are
played in one process, in lockstep, which is what the engine computes, bit for bit.

`digest`: makes of those rows what pilot_law.py and judgements.py need, in benchmarks/results/pilots.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pilot_tasks import TASKS, Task, Training, made, parameters_of
from rows import Row, add, has, read

from gradlab.analysis import replay_plans
from gradlab.capture.writing.trace_writer import TraceWriter
from gradlab.codec import Tensors
from gradlab.collectives import sum_in_rank_order
from gradlab.ddp.optimizers import is_plain_sgd
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import Layer, layers_of
from gradlab.plan import Plan, named_plan
from gradlab.runtime.pilot.growth import chance_of
from gradlab.runtime.pilot.result import outcome_of, race
from gradlab.saving import Saving
from gradlab.trace import Trace

PLACES = {"early": 0.1, "middle": 0.4, "late": 0.75}
RECORDED, CHECKED = 32, 16  # steps of a recording, batches of a validation
PILOTS = (20, 60, 120)
REPLAYED = ("early", "middle")
DIGEST = Path(__file__).parents[1] / "results" / "pilots.jsonl"
CONTROL = "16 bits"
PLANS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    CONTROL: ("cast", {"dtype": "bfloat16"}),
    "int4": ("block_scaled", {"dtype": "int4"}),
    "QSGD 4": ("QSGD, max norm", {"bits": 4}),
    "ecsq 1": ("ecsq", {"bits": 1.0}),
    "ecsq .25": ("ecsq", {"bits": 0.25}),
    "PowerSGD 4": ("PowerSGD", {"rank": 4}),
    "PowerSGD 1": ("PowerSGD", {"rank": 1}),
    "QSGD 2": ("QSGD, max norm", {"bits": 2}),
    "top-k 10 %": ("topk", {"density": 0.1}),
    "top-k 1 %": ("topk", {"density": 0.01}),
    "signs both ways": ("sign", {}),
}


class Run:
    """A training on N ranks that are played one after another, which can be copied in the middle."""

    def __init__(self, task: Task, training: Training, seed: int) -> None:
        self.task, self.training, self.seed = task, training, seed

    def copied(self) -> Run:
        """Copy model and optimizer together; data stay."""
        old = self.training
        model, optimizer = copy.deepcopy((old.model, old.optimizer))
        new = Training(model, optimizer, old.draw, old.loss, old.rate, old.clip)
        return Run(self.task, new, self.seed)

    def gradients(self, step: int) -> tuple[list[Tensors], float]:
        """Each rank's gradients by name, and the mean loss."""
        training, found, losses, first = self.training, [], [], {}
        buffers = {name: one.clone() for name, one in training.model.named_buffers()}
        for rank in range(self.task.ranks):
            self._put(buffers)
            generator = torch.Generator().manual_seed((self.seed * 100_003 + step) * 64 + rank)
            torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
            training.model.zero_grad()
            loss = training.loss(training.model, training.draw(generator))
            loss.backward()
            losses.append(float(loss.detach()))
            found.append({name: one.grad for name, one in parameters_of(training).items() if one.grad is not None})
            first = first or {name: one.clone() for name, one in training.model.named_buffers()}
        self._put(first)
        return found, statistics.fmean(losses)

    def step(self, step: int, means: Tensors) -> None:
        """Take an optimizer's step with mean gradients."""
        training = self.training
        for name, parameter in parameters_of(training).items():
            parameter.grad = means[name]
        if training.clip:
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), training.clip)
        for group in training.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group["lr"] = group["initial_lr"] * training.rate(step / self.task.steps)
        training.optimizer.step()

    @torch.no_grad()
    def validated(self) -> float:
        """The mean loss on batches that no step has."""
        self.training.model.eval()
        generator = torch.Generator().manual_seed(77_777_777 + self.seed)
        found = [self.training.loss(self.training.model, self.training.draw(generator)) for _ in range(CHECKED)]
        self.training.model.train()
        return float(torch.stack(found).mean())

    def _put(self, buffers: Tensors) -> None:
        for name, buffer in self.training.model.named_buffers():
            buffer.copy_(buffers[name])


def under(run: Run, plan: Plan, begin: int) -> tuple[list[float], float]:
    """Train from a step to the end. Returns losses, and the wire bytes of a step and rank. A diverged run ends."""
    lockstep = LockstepPlan(plan, run.task.ranks, is_plain_sgd(run.training.optimizer))
    losses, sent = [], []
    for step in range(begin, run.task.steps):
        gradients, loss = run.gradients(step)
        losses.append(loss)
        if not math.isfinite(loss) or loss > 100 * max(abs(losses[0]), 0.1):
            return [*losses, math.inf], statistics.fmean(sent)
        result = lockstep.step(step, gradients)
        means = {name: value for ranks in result.exchanged.values() for name, value in ranks[0].mean.items()}
        sent.append(statistics.fmean(result.wire))
        run.step(step, {name: means[name] if name in means else mean_of(gradients, name) for name in gradients[0]})
    return losses, statistics.fmean(sent)


def mean_of(gradients: Sequence[Tensors], name: str) -> torch.Tensor:
    """The mean of what travels uncompressed."""
    return sum_in_rank_order([one[name] for one in gradients])


def plans_of(layers: Sequence[Layer]) -> dict[str, Plan]:
    """All plans that compress anything of a model."""
    found = {}
    for name, (method, settings) in PLANS.items():
        try:
            plan = named_plan(tuple(layers), method, **settings)
        except GradlabError:
            continue
        if plan.compressed_groups:
            found[name] = plan
    return found


def dense(run: Run, folder: Path, losses: list[float]) -> Iterator[tuple[str, int, Run]]:
    """Train densely, and note losses. Yields each place with a copy of the run there."""
    layers = layers_named(run.training)
    begins = {round(share * run.task.steps): name for name, share in PLACES.items()}
    writers: dict[str, tuple[int, TraceWriter]] = {}
    for step in range(run.task.steps):
        if name := begins.get(step):
            writers[name] = step, TraceWriter(folder / name, layers, run.task.ranks)
            yield name, step, run.copied()
        gradients, loss = run.gradients(step)
        losses.append(loss)
        for begin, writer in writers.values():
            if begin <= step < begin + RECORDED:
                for rank, own in enumerate(gradients):
                    writer.append(rank, step, own)
            elif step == begin + RECORDED:
                writer.close()
        run.step(step, {name: mean_of(gradients, name) for name in gradients[0]})


def layers_named(training: Training) -> tuple[Layer, ...]:
    """The layers as a plan takes them."""
    trained = parameters_of(training)
    return tuple(layer for layer in layers_of(training.model) if layer.name in trained)


def judged(folder: Path, plans: Mapping[str, Plan]) -> dict[str, Row]:
    """Results of plans' replays: cosines by length of window, and whether they apply earlier gradients."""
    with Trace(folder) as trace:
        found = replay_plans(trace, plans)
    rows = {}
    for name, replay in found.items():
        if isinstance(replay, GradlabError):
            continue
        cosines = {one.length: one.cosine for one in replay.window_errors}
        rows[name] = {"memory": replay.memory, "cosines": cosines}
    return rows


def train(name: str, seed: int, data: Path, path: Path) -> None:
    """Train a task with all plans, from all places."""
    key = {"task": name, "seed": seed}
    done = read(path)
    if has(done, {**key, "plan": "all"}):
        return
    task, training = made(name, seed, data)
    run = Run(task, training, seed)
    layers = layers_named(training)
    plans = plans_of(layers)
    with tempfile.TemporaryDirectory() as kept:
        dense_losses: list[float] = []
        places = list(dense(run, Path(kept), dense_losses))
        ends = run.validated()
        whole = 4 * sum(layer.numel for layer in layers) * 2 * (task.ranks - 1) / task.ranks
        for place, begin, at in places:
            replays = judged(Path(kept) / place, plans) if place in REPLAYED else {}
            for plan_name, plan in plans.items():
                here = {**key, "place": place, "plan": plan_name}
                if has(done, here):
                    continue
                began, tried = time.perf_counter(), at.copied()
                losses, sent = under(tried, plan, begin)
                row = {**here, "begin": begin, "steps": task.steps, "ranks": task.ranks, **replays.get(plan_name, {})}
                row |= {"valid": tried.validated(), "dense_valid": ends, "ratio": whole / sent}
                row |= {
                    "losses": rounded(losses),
                    "dense": rounded(dense_losses[begin:]),
                    "seconds": time.perf_counter() - began,
                }
                add(path, row, ("losses", "dense", "cosines"))
    add(path, {**key, "plan": "all"})


def digest(paths: Sequence[Path]) -> list[Row]:
    """Every plan's figures for the law: its pilots by length, its steps in a race, and its end on other batches."""
    rows = [row for path in paths for row in read(path) if row["plan"] != "all"]
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["task"], row["seed"], row["place"]), []).append(row)
    return [_digest(row, raced) for run in runs.values() for raced in [_raced(run)] for row in run]


def _digest(row: Row, raced: Mapping[str, int]) -> Row:
    losses, dense = _finite(row["losses"]), _finite(row["dense"])
    pilots = {}
    for steps in PILOTS:
        if len(dense) >= steps:
            one = outcome_of(row["plan"], _padded(losses, steps), dense[:steps], _saving(row))
            values = (one.excess, one.low, one.high)
            pilots[steps] = [round(value, 6) if math.isfinite(value) else None for value in values]
    diverged = not math.isfinite(losses[-1]) or not math.isfinite(row["valid"])
    cosines = {length: round(row["cosines"][length], 6) for length in ("1", "4") if length in row.get("cosines", {})}
    return {
        **{key: row[key] for key in ("task", "seed", "place", "plan", "begin", "steps", "ranks")},
        "memory": row.get("memory"),
        "cosines": cosines,
        "ratio": round(row["ratio"], 3),
        "end": None if diverged else round(row["valid"] / row["dense_valid"] - 1, 6),
        "pilots": pilots,
        "raced": raced.get(row["plan"], 0),
    }


def _raced(run: Sequence[Row]) -> dict[str, int]:
    """Steps of each plan in a pilot of 60 and 120 steps for a limit of 1 %; too short a run has none."""
    dense = _finite(run[0]["dense"])[:120]
    if len(dense) < 120:
        return {}
    plans, [control] = [row for row in run if row["plan"] != CONTROL], [row for row in run if row["plan"] == CONTROL]
    half = outcome_of(CONTROL, _finite(control["losses"])[:120], dense, _saving(control))
    chance = chance_of(half.low, half.high)
    losses = {row["plan"]: _padded(_finite(row["losses"]), 120) for row in plans}
    savings = {row["plan"]: _saving(row) for row in plans}
    return {one.name: one.steps for one in race(losses, dense, savings, steps=60, max_loss=0.01, chance=chance)}


def _finite(losses: Sequence[float | None]) -> list[float]:
    return [math.inf if one is None else one for one in losses]


def _padded(losses: Sequence[float], steps: int) -> list[float]:
    return [*losses, *[math.inf] * steps][:steps]


def _saving(row: Row) -> Saving:
    return Saving(row["ratio"], row["ratio"] / 2)


def rounded(losses: Sequence[float]) -> list[float | None]:
    """Seven digits; null for what is not finite."""
    return [float(f"{loss:.7g}") if math.isfinite(loss) else None for loss in losses]


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("--data", type=Path, required=True)
    training.add_argument("--rows", type=Path, required=True)
    training.add_argument("--tasks", nargs="*", default=list(TASKS))
    training.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    digesting = commands.add_parser("digest")
    digesting.add_argument("--rows", type=Path, nargs="+", required=True)
    options = parser.parse_args()
    if options.command == "digest":
        DIGEST.write_text("".join(json.dumps(row) + "\n" for row in digest(options.rows)))
        return
    torch.set_num_threads(1)
    for seed in options.seeds:
        for name in options.tasks:
            train(name, seed, options.data, options.rows)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
