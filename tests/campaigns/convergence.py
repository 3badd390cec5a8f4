"""Train a small network with every codec, alone and under every kind of residual; nothing may diverge in silence.

    PYTHONPATH=tests python tests/campaigns/convergence.py [--codecs TEXT,TEXT] [--modes TEXT] [--optimizers SGD,AdamW]
        [--steps 300] [--rows FILE]       rows that FILE has are not run again
    python tests/campaigns/convergence.py --rows benchmarks/results/convergence.jsonl --table

Digits (bundled with scikit-learn), a network of two layers, 4 nodes in lockstep that share the batch, SGD and AdamW.
Both weights are compressed, as one group. A run of `--steps` steps
    converges   if it takes the loss at least 80 % of the way that dense training takes it,
    is refused  when the plan is made, with a line,
    is warned   by a rule that watches the run (`gradlab.executor.rules`), with its line,
    is SILENT   if it is none of these, by the median of three seeds. The exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from gradlab import codecs
from gradlab.datasets.digits import Digits
from gradlab.errors import GradlabError
from gradlab.executor import rules
from gradlab.executor.lockstep_plan import LockstepPlan, LockstepWatch, StepResult
from gradlab.layout import layers_of
from gradlab.plan import Plan, Wrap

NODES, BATCH, SEEDS = 4, 64, 3
WAY = 0.8  # share of dense training's decrease of the loss from which a run converges
RATES = {"SGD": 0.1, "AdamW": 0.003}
LEARNING = {"training_steps": 40, "optimizer": "adam", "loss": "mean", "most_error": 1e9}
SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "block_scaled": ({}, {"dtype": "int4"}, {"dtype": "int4", "stochastic": True}, {"dtype": "float8_e5m2"}),
    "cast": ({}, {"dtype": "bfloat16"}),
    "clt_k": ({}, {"density": 0.002}),
    "dct_topk": ({}, {"chunk": 64, "count": 1}),
    "gradiveq": ({"sample_steps": 20, "compressed_steps": 60, "slice_size": 64},),
    "lgc_ring": ({"density": 0.02, **LEARNING},),
    "lgc_server": ({"density": 0.02, **LEARNING},),
    "natural": ({},),
    "one_bit": ({},),
    "powersgd": ({}, {"rank": 1}),
    "qsgd": (
        {},
        {"bits": 2},
        {"bits": 1},
        {"bits": 4, "norm": "l2"},
        {"bits": 2, "norm": "l2"},
        {"bits": 2, "norm": "l2", "bucket_size": 8192},
        {"ring": True},
    ),
    "random_k": ({}, {"density": 0.002}, {"unbiased": True}, {"density": 0.002, "unbiased": True}),
    "sampled_threshold": ({}, {"density": 0.002}),
    "sign": ({}, {"scale": "one"}),
    "terngrad": ({}, {"clip": 0.0}, {"shared_scale": True}, {"clip": 0.0, "shared_scale": True}),
    "threshold": ({}, {"density": 0.002}),
    "topk": ({}, {"density": 0.002}),
}
MODES: dict[str, tuple[Wrap, ...]] = {
    "no feedback": (),
    "feedback": (Wrap("error_feedback"),),
    "feedback, two-way": (Wrap("error_feedback"), Wrap("two_way")),
    "two-way": (Wrap("two_way"),),
    "correction": (Wrap("momentum_correction"),),
}


@dataclass
class Row:
    """One run.

    loss, dense: of the test set after the last step, with the codec and without, nats.
    residual: the largest norm of a rank's compression error over that of its gradient, at the last step.
    verdict: "converges", "refused", "warned" or "SILENT"; why: the lines of whoever refused or warned.
    """

    codec: str
    settings: dict[str, Any]
    mode: str
    optimizer: str
    loss: float = math.nan
    dense: float = math.nan
    residual: float = math.nan
    verdict: str = ""
    why: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.name} | {self.mode} | {self.optimizer}"

    @property
    def name(self) -> str:
        return ", ".join([self.codec, *(f"{key} {value}" for key, value in self.settings.items())])


def residual_of(done: StepResult, gradients: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """The largest norm of a rank's compression error over that of its gradient."""

    def norm(tensors: Iterable[torch.Tensor]) -> float:
        return math.hypot(*(float(tensor.norm()) for tensor in tensors))

    return max(
        norm(own.compression_error.values()) / max(norm(gradient[name] for name in own.mean), 1e-30)
        for ranks in done.exchanged.values()
        for own, gradient in zip(ranks, gradients, strict=True)
    )


class Task:
    """Digits on a network of two layers; `parameters` are called as a module of two linear layers calls them."""

    def __init__(self, seed: int = 0) -> None:
        data = Digits().load()
        self.train, self.test = (data.train_x.flatten(1), data.train_y), (data.test_x.flatten(1), data.test_y)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.parameters = dict(self.model.named_parameters())
        self._draw = torch.Generator().manual_seed(seed)

    def loss(self) -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(self.model(self.test[0]), self.test[1]))

    def gradients(self) -> list[dict[str, torch.Tensor]]:
        """Gradients of one batch that the nodes share, by node: one pass, over a copy of the parameters per node."""
        batch = torch.randint(len(self.train[0]), (NODES, BATCH // NODES), generator=self._draw)
        copies = {
            name: value.detach().expand(NODES, *value.shape).clone().requires_grad_()
            for name, value in self.parameters.items()
        }
        inner, inner_bias, outer, outer_bias = copies.values()
        hidden = torch.baddbmm(inner_bias[:, None], self.train[0][batch], inner.mT).relu()
        classes = torch.baddbmm(outer_bias[:, None], hidden, outer.mT)
        loss = NODES * functional.cross_entropy(classes.flatten(0, 1), self.train[1][batch].flatten())
        grads = torch.autograd.grad(loss, list(copies.values()))
        return [{name: grad[node] for name, grad in zip(copies, grads, strict=True)} for node in range(NODES)]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[name]
    return kind(model.parameters(), lr=RATES[name])


def run(row: Row, steps: int, starts: float) -> None:
    """Train, and fill in the row. Three seeds of the plan decide by their median of a run that would be silent."""
    losses: list[float] = []
    for seed in range(SEEDS):
        train(row, steps, starts, seed)
        losses.append(row.loss if math.isfinite(row.loss) else math.inf)
        if row.verdict != "SILENT":
            return
    row.loss = median(losses)
    if starts - row.loss >= WAY * (starts - row.dense):
        row.verdict = "converges"


def train(row: Row, steps: int, starts: float, seed: int) -> None:
    """Train under one seed of the plan, and fill in the row."""
    task = Task()
    layers = layers_of(task.model)
    try:
        plan = Plan.uniform(
            layers,
            row.codec,
            wrappers=MODES[row.mode],
            roles=("linear",),
            minimum_dimensions=2,
            minimum_numel=256,
            group_bytes=math.inf,
            warmup_steps=0,
            seed=seed,
            **row.settings,
        )
    except GradlabError as error:
        row.verdict, row.why = "refused", [str(error)]
        return
    lockstep = LockstepPlan(plan, NODES, plain_sgd=row.optimizer == "SGD")
    optimizer, watch = optimizer_of(row.optimizer, task.model), LockstepWatch(lockstep)
    rates = {layer.name: RATES[row.optimizer] for layer in layers}
    for step in range(steps):
        gradients = task.gradients()
        done = lockstep.step(step, gradients, rates)
        watch.see(done, gradients)
        means = {name: torch.stack([own[name] for own in gradients]).mean(0) for name in gradients[0]}
        means |= {name: value for ranks in done.exchanged.values() for name, value in ranks[0].mean.items()}
        for name, parameter in task.model.named_parameters():
            parameter.grad = means[name].clone()
        optimizer.step()
        if not done.finite:
            break
    row.loss, row.residual = task.loss(), residual_of(done, gradients)
    found = [*filter(None, [rules.no_feedback(lockstep.codecs)]), *watch.findings]
    row.why = [rules.sentence([one], NODES) for one in found]
    good = math.isfinite(row.loss) and starts - row.loss >= WAY * (starts - row.dense)
    row.verdict = "converges" if good else "warned" if row.why else "SILENT"
    if good and row.why:
        row.verdict = "converges, warned"


def dense(steps: int) -> tuple[float, dict[str, float]]:
    """The loss before training, and after dense training by optimizer."""
    losses = {}
    for name in RATES:
        task = Task()
        optimizer, start = optimizer_of(name, task.model), task.loss()
        for _ in range(steps):
            gradients = task.gradients()
            for key, parameter in task.model.named_parameters():
                parameter.grad = torch.stack([own[key] for own in gradients]).mean(0)
            optimizer.step()
        losses[name] = task.loss()
    return start, losses


def rows(wanted: str, modes: str, optimizers: str) -> Iterator[Row]:
    """Yield the runs to make. Momentum correction needs SGD."""
    for mode in (mode for mode in MODES if modes in mode):
        for optimizer in (name for name in RATES if name in optimizers.split(",")):
            for codec in codecs.names() if mode != "correction" or optimizer == "SGD" else ():
                for settings in SETTINGS.get(codec, ({},)):
                    row = Row(codec, settings, mode, optimizer)
                    if any(text in row.name for text in wanted.split(",")):
                        yield row


def read(path: Path | None) -> dict[str, Row]:
    """Read the rows that a file has, by key."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    known = [Row(**json.loads(line)) for line in lines]
    return {row.key: row for row in known}


def show(done: Sequence[Row]) -> None:
    """The table, and below it each refusal and warning once."""
    notes: dict[str, int] = {}
    width = max(len(row.name) for row in done)
    columns = list(dict.fromkeys((row.mode, row.optimizer) for row in done))
    print(f"{'codec':<{width}}  " + "  ".join(f"{mode + ', ' + opt:<26}" for mode, opt in columns))
    for name in dict.fromkeys(row.name for row in done):
        cells = []
        for column in columns:
            for row in done:
                if row.name == name and (row.mode, row.optimizer) == column:
                    marks = "".join(f"[{notes.setdefault(line, len(notes) + 1)}]" for line in row.why)
                    loss = "" if math.isnan(row.loss) and row.verdict == "refused" else f"{row.loss:.3g} "
                    cells.append(f"{loss}{row.verdict} {marks}")
        print(f"{name:<{width}}  " + "  ".join(f"{cell:<26}" for cell in cells))
    for line, number in notes.items():
        print(f"[{number}] {line}")


VERDICTS = ("converges", "converges, warned", "warned", "refused", "SILENT")


def counts(done: Iterable[Row]) -> str:
    """Lay out as Markdown how many runs ended how, by wrappers and optimizer."""
    seen = Counter((row.mode, row.optimizer, row.verdict) for row in done)
    lines = [f"| wrappers | optimizer | {' | '.join(VERDICTS)} |", "|---" * (2 + len(VERDICTS)) + "|"]
    for mode in MODES:
        for optimizer in RATES if mode != "correction" else ("SGD",):
            ends = " | ".join(str(seen[mode, optimizer, verdict]) for verdict in VERDICTS)
            lines.append(f"| {mode} | {optimizer} | {ends} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codecs", default="")
    parser.add_argument("--modes", default="")
    parser.add_argument("--optimizers", default=",".join(RATES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--table", action="store_true")
    wanted = parser.parse_args()
    if wanted.table:
        print(counts(read(wanted.rows).values()))
        return 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start, losses = dense(wanted.steps)
    print(f"loss {start:.3g} before training; dense: {', '.join(f'{key} {loss:.3g}' for key, loss in losses.items())}")
    known = read(wanted.rows)
    done = []
    for row in rows(wanted.codecs, wanted.modes, wanted.optimizers):
        done.append(known.get(row.key, row))
        if row.key in known:
            continue
        began = time.monotonic()
        row.dense = losses[row.optimizer]
        run(row, wanted.steps, start)
        row.seconds = time.monotonic() - began
        numbers = f"loss {row.loss:.3g}, residual {row.residual:.3g}, {row.seconds:.1f} s"
        why = "; ".join(row.why)[:150]
        print(f"{row.key}: {row.verdict} ({numbers}) {why}", flush=True)
        if wanted.rows:
            with wanted.rows.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    show(done)
    silent = [row for row in done if row.verdict == "SILENT"]
    print(f"{len(done)} runs, {len(silent)} silent")
    return int(bool(silent))


if __name__ == "__main__":
    sys.exit(main())
