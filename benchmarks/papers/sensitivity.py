"""Does a layer's L2 error tell how much its compression hurts? L-GreCo's section 5.4 and Fig. 11a.

    python benchmarks sensitivity images --data cifar10.npz --out images.json [--feedback] [--codec topk]
    python benchmarks sensitivity images --out images.json --table

From checkpoints of a dense run (tasks of layer_plans.py, emulated nodes), short runs on the same data with one layer
compressed at one setting; the difference of the loss, on samples that do not change, to the run without compression is
the layer's sensitivity. Beside it the squared error on the gradients of these batches, summed, at the checkpoint. A
layer sent in 16 bits loses next to nothing: what that does to the loss is noise, and is told too. The paper's 50
iterations would be mostly noise on a model this small, whose rounding errors grow from step to step: here it is 10, in
float32. One line of JSON per checkpoint.
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

from gradlab.codec import Tensors
from gradlab.datasets.optimizer import build_optimizer
from gradlab.ddp.optimizers import is_plain_sgd
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.plan.layer_errors import Candidate, squared_errors

SEED, JUDGED = 7, 2000
NOISE = Candidate("cast", {"dtype": "float16"}, {}, ())
CHECKPOINTS = (50, 200)
SETTINGS: dict[str, tuple[str, Sequence[Any]]] = {
    "powersgd": ("rank", (1, 2, 4, 8)),
    "topk": ("density", (0.001, 0.01, 0.1)),
}
SHOWN = ("checkpoint", "loss", "noise", "spread")


class Checkpoint:
    """A dense run's state after so many iterations, the batches that follow, and what the loss is judged on."""

    def __init__(self, task: Task, data: Any, first: int, steps: int) -> None:
        self.task, self.first = task, first
        self.model = task.model(SEED)
        self.optimizer = build_optimizer(task.recipe, self.model.parameters())
        self.dense = Plan(layers_of(self.model))
        every = islice(task.micro_batches(data, SEED), first + steps)
        batches = list(every)
        self._advance(self.model, self.optimizer, self.dense, 0, batches[:first])
        self.batches = batches[first:]
        self.judged = data.train_x[:JUDGED], data.train_y[:JUDGED]

    def _advance(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, first: int, batches: Sequence[Micro]
    ) -> None:
        lockstep = LockstepPlan(plan, self.task.ranks, is_plain_sgd(optimizer))
        for number, micro in enumerate(batches):
            compressed_gradients(self.task, model, optimizer, lockstep, first + number, micro)
            optimizer.step()

    def run(self, plan: Plan) -> float:
        """The loss after a short run."""
        model = copy.deepcopy(self.model)
        optimizer = build_optimizer(self.task.recipe, model.parameters())
        optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self._advance(model, optimizer, plan, self.first, self.batches)
        model.eval()
        with torch.no_grad():
            x, y = self.judged
            parts = [float(self.task.loss(model, a, b)) for a, b in zip(x.split(50), y.split(50), strict=True)]
        return float(np.mean(parts))

    def accumulated(self) -> list[Tensors]:
        """Each node's gradients, summed over the short run at the checkpoint's parameters."""
        model = copy.deepcopy(self.model)
        total: list[Tensors] = []
        for micro in self.batches:
            gradients, _ = node_gradients(self.task, model, micro)
            if not total:
                total = [{name: value.clone() for name, value in of_rank.items()} for of_rank in gradients]
                continue
            for kept, of_rank in zip(total, gradients, strict=True):
                for name, value in of_rank.items():
                    kept[name] += value
        return total


def measure(task: Task, data: Any, codec: str, first: int, steps: int, feedback: bool) -> dict[str, Any]:
    """Sensitivities and errors at one checkpoint."""
    name, values = SETTINGS[codec]
    around = None if feedback else ()
    candidates = [Candidate(codec, {name: value}, {}, around) for value in values]
    checkpoint = Checkpoint(task, data, first, steps)
    layers = checkpoint.dense.layers
    uniform = Plan.uniform(layers, codec, group_bytes=0, **{name: values[0]})
    planned = [layer for group in uniform.compressed_groups for layer in uniform.members(group)]
    loss, losses = checkpoint.run(Plan(layers)), []
    for done, layer in enumerate(planned, start=1):
        plans = [Plan(layers, (candidate.group(layer.name),)) for candidate in (*candidates, NOISE)]
        losses.append([checkpoint.run(plan) - loss for plan in plans])
        print(f"short runs of layer {done}/{len(planned)}", flush=True)
    ranks = checkpoint.accumulated()
    errors = [np.sum([squared_errors(x, of_rank[x.name], candidates) for of_rank in ranks], axis=0) for x in planned]
    differences = [np.array(row[:-1]) for row in losses]
    noise = [row[-1] for row in losses]
    return {
        "codec": codec,
        "varied": name,
        "settings": list(values),
        "checkpoint": first,
        "steps": steps,
        "feedback": feedback,
        "noise": float(np.std(noise)),
        "spread": np.std(differences, axis=0).tolist(),
        "loss": loss,
        "layers": [layer.name for layer in planned],
        "errors": np.array(errors).tolist(),
        "differences": np.array(differences).tolist(),
    }


def correlations(errors: Sequence[Any], differences: Sequence[Any]) -> list[float]:
    """Pearson's correlations of errors with loss differences, (layers, settings) each, over layers (Fig. 11a)."""
    pairs = zip(np.array(errors).T, np.array(differences).T, strict=True)
    return [float(stats.pearsonr(*pair).statistic) for pair in pairs]


def table(rows: Sequence[Row]) -> str:
    """Correlations over layers of errors with loss differences, and with their magnitudes, by codec and checkpoint."""
    lines = []
    for row in rows:
        settings = " ".join(f"{value:>6g}" for value in row["settings"])
        lines.append(f"{row['codec']}, iteration {row['checkpoint']:<21d} {row['varied']:>8s} {settings}")
        differences = np.array(row["differences"])
        for what, values in (("loss difference", differences), ("its magnitude", np.abs(differences))):
            cells = " ".join(f"{value:6.2f}" for value in correlations(row["errors"], values))
            lines.append(f"  {'Pearson, ' + what:46s} {cells}")
        lines.append(f"  spread of differences {max(row['spread']):.4f}, of a layer sent in 16 bits {row['noise']:.6f}")
    return "\n".join(lines)


def main() -> None:
    """See the module's text."""
    named = {"codec": SETTINGS, "checkpoints": list(CHECKPOINTS), "steps": 10, "feedback": False, "table": False}
    chosen = options(__doc__, ("task", TASKS), data=str, out=Path, **named)
    torch.set_num_threads(1)
    task = replace(TASKS[chosen.task], autocast=False)
    if chosen.data:
        data = task.workload.load(chosen.data, train_limit=20000, test_limit=2000)
        for first in chosen.checkpoints:
            row = {"task": chosen.task} | measure(task, data, chosen.codec, first, chosen.steps, chosen.feedback)
            add(chosen.out, row, unshown=set(row) - set(SHOWN))
    if chosen.table:
        print(table([row for row in read(chosen.out) if row["task"] == chosen.task]))


if __name__ == "__main__":
    main()
