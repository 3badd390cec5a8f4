"""Does a layer's L2 error tell how much its compression hurts? L-GreCo's section 5.4 and Fig. 11a.

    python benchmarks sensitivity --data cifar10.npz --out ROWS.jsonl [--checkpoints 50 200] [--steps 10]
    python benchmarks sensitivity --out ROWS.jsonl --table

From checkpoints of a dense run of layer_plans.py's images, short runs on the same data in float32 with one layer
compressed by PowerSGD of one rank. The layer's sensitivity is the difference of the loss, on 2000 training samples, to
the run without compression. Beside it stands the squared error on the gradients of these batches, summed, at the
checkpoint. A layer sent in 16 bits loses next to nothing: what that does to the loss is noise. A row is a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from emulated import Micro, Task, compressed_gradients, node_gradients
from layer_plans import TASKS
from rows import Row, add, options, read
from scipy import stats

from gradlab.datasets.optimizer import build_optimizer
from gradlab.ddp.optimizers import HeldLayers
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate, squared_errors

SEED, JUDGED = 7, 2000
RANKS = (1, 2, 4, 8)  # of PowerSGD
CANDIDATES = [Candidate("powersgd", {"rank": rank}, {}, ()) for rank in RANKS]
NOISE = Candidate("cast", {"dtype": "float16"}, {}, ())


def advance(
    task: Task, model: torch.nn.Module, optimizer: Any, plan: Plan, first: int, batches: Sequence[Micro]
) -> None:
    lockstep = LockstepPlan(plan, task.ranks, HeldLayers(optimizer).plain_sgd())
    for step, micro in enumerate(batches, first):
        compressed_gradients(task, model, optimizer, lockstep, step, micro)
        optimizer.step()


def measure(task: Task, data: Any, first: int, steps: int) -> Row:
    """Sensitivities and errors at the checkpoint after `first` iterations, by layer and rank."""
    model = task.model(SEED)
    optimizer = build_optimizer(task.recipe, model.parameters())
    layers, batches = layers_of(model), list(islice(task.micro_batches(data, SEED), first + steps))
    advance(task, model, optimizer, Plan(layers), 0, batches[:first])
    judged = list(zip(data.train_x[:JUDGED].split(50), data.train_y[:JUDGED].split(50), strict=True))

    def loss_after(plan: Plan) -> float:
        run = copy.deepcopy(model)
        of_run = build_optimizer(task.recipe, run.parameters())
        of_run.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        advance(task, run, of_run, plan, first, batches[first:])
        run.eval()
        with torch.no_grad():
            return float(np.mean([float(task.loss(run, x, y)) for x, y in judged]))

    uniform = Plan.uniform(layers, "powersgd", group_bytes=0, rank=RANKS[0])
    planned = [layer for group in uniform.compressed_groups for layer in uniform.members(group)]
    loss, losses = loss_after(Plan(layers)), []
    for done, layer in enumerate(planned, start=1):
        plans = [Plan(layers, (candidate.group(layer.name),)) for candidate in (*CANDIDATES, NOISE)]
        losses.append([loss_after(plan) - loss for plan in plans])
        print(f"short runs of layer {done}/{len(planned)}", flush=True)
    micros = [node_gradients(task, model, micro)[0] for micro in batches[first:]]
    ranks = [{name: sum(one[name] for one in of_rank) for name in of_rank[0]} for of_rank in zip(*micros, strict=True)]
    errors = [np.sum([squared_errors(x, of_rank[x.name], CANDIDATES) for of_rank in ranks], axis=0) for x in planned]
    differences = np.array(losses)
    return {
        **{"codec": "powersgd", "varied": "rank", "settings": list(RANKS), "checkpoint": first, "steps": steps},
        "noise": float(np.std(differences[:, -1])),
        "spread": np.std(differences[:, :-1], axis=0).tolist(),
        "loss": loss,
        "layers": [layer.name for layer in planned],
        "errors": np.array(errors).tolist(),
        "differences": differences[:, :-1].tolist(),
    }


def table(rows: Sequence[Row]) -> str:
    """Pearson's correlations over layers of errors with loss differences, and with their magnitudes (Fig. 11a)."""
    lines = []
    for row in rows:
        settings = " ".join(f"{value:>6g}" for value in row["settings"])
        lines.append(f"{row['codec']}, iteration {row['checkpoint']:<21d} {row['varied']:>8s} {settings}")
        errors, differences = np.array(row["errors"]).T, np.array(row["differences"]).T
        for what, values in (("loss difference", differences), ("its magnitude", np.abs(differences))):
            pairs = zip(errors, values, strict=True)
            cells = " ".join(f"{stats.pearsonr(*pair).statistic:6.2f}" for pair in pairs)
            lines.append(f"  {'Pearson, ' + what:46s} {cells}")
        lines.append(f"  spread of differences {max(row['spread']):.4f}, of a layer sent in 16 bits {row['noise']:.6f}")
    return "\n".join(lines)


def main() -> None:
    chosen = options(__doc__, data=str, out=Path, checkpoints=[50, 200], steps=10, table=False)
    torch.set_num_threads(1)
    task = replace(TASKS["images"], autocast=False)
    if chosen.data:
        data = task.workload.load(chosen.data, train_limit=20000, test_limit=2000)
        for first in chosen.checkpoints:
            add(chosen.out, measure(task, data, first, chosen.steps), ("layers", "errors", "differences"))
    if chosen.table:
        print(table(read(chosen.out)))
