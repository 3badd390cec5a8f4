"""Along which axis of a transformer's matrices GradiVeQ's slices should lie: what bases lose on later iterations.

    python benchmarks/slice_axes.py --rows benchmarks/results/slice-axes.jsonl --data tinyshakespeare.txt --work DIR
                                    [--seeds 0 1]
    python benchmarks/slice_axes.py --rows benchmarks/results/slice-axes.jsonl --table

GPT-2 of transformers (2 layers, 64 wide, 4 heads, context 64, tied head, no dropout, random weights) on characters.
4 emulated nodes have 8 rows each. AdamW at 1e-3, 50 iterations of warm-up, weight decay 0.1, gradients clipped at
norm 1, 300 iterations, all of them recorded. Bases of K / d = 20 without whitening are fitted on iterations 50 to 149.
A row has the share of the averaged gradient's energy that they lose on iterations 150 to 299, and that of random bases
of the same size. One line of JSON per seed, pooled slices and axis; what is there is not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rows import Row, add, has, read
from torch import nn

from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.capture import EmulatedNodes
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.datasets import get
from gradlab.datasets.workload import Data
from gradlab.learning.slice_pca import SLICE_AXES
from gradlab.trace import Trace

NODES, ROWS, STEPS, CONTEXT = 4, 8, 300, 64
WARMUP, RATE = 50, 1e-3
START, SAMPLES = 50, 100
POOLED = (8, 1)  # slices that share a basis; 1: bases of the first slice alone, the paper's
SET = tuple(axis for axis in SLICE_AXES if axis != "auto")
# What a row of the table is called, by the end of a weight's name. GPT-2 stores matrices as inputs x outputs.
ROLES = {
    "wte.weight": "token embedding",
    "wpe.weight": "position embedding",
    "attn.c_attn.weight": "attention, packed",
    "attn.c_proj.weight": "attention, output",
    "mlp.c_fc.weight": "MLP up",
    "mlp.c_proj.weight": "MLP down",
}


def model_of(vocabulary: int, seed: int) -> nn.Module:
    """Return GPT-2 with random weights, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel  # the table is printed without it

    torch.manual_seed(seed)
    rates: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size: dict[str, Any] = {"vocab_size": vocabulary, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(**size, **rates, bos_token_id=0, eos_token_id=0))


def record(data: Data, folder: Path, seed: int) -> None:
    """Train, and record all iterations of all nodes."""
    model = model_of(int(data.train_x.max()) + 1, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    draw = torch.Generator().manual_seed(seed)
    with EmulatedNodes(model, folder, world_size=NODES, optimizer=optimizer) as nodes:
        for _ in range(STEPS):
            optimizer.zero_grad()
            for rank, rows in enumerate(torch.randint(len(data.train_x), (NODES, ROWS), generator=draw)):
                with nodes.node(rank):
                    scores = model(data.train_x[rows]).logits
                    loss = nn.functional.cross_entropy(scores.flatten(0, 1), data.train_y[rows].flatten())
                    loss.backward()
                    nodes.annotate(loss=loss.detach())
            nodes.average()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


def measured(trace: Trace, axis: str, pooled: int) -> Row:
    """Return the loss on later iterations of all layers together, of random bases, and of every layer with its axis."""
    settings = GradiVeQ.Settings(ratio=20, pooled=pooled, whitening=False, compressed_steps=0, slice_axis=axis)
    found = fit_gradiveq(trace, samples=SAMPLES, start=START, settings=settings).measured
    shapes = {layer.name: layer.shape for layer in trace.layers}
    layers = {
        name: {"shape": list(shapes[name]), "axis": layer.slice_axis, "loss": found.holdout.groups[name].loss}
        for name, layer in found.layers.items()
    }
    return {"loss": found.holdout.loss, "random": found.random_basis.loss, "layers": layers}


def run(rows: Path, data: Data, work: Path, seeds: Sequence[int]) -> None:
    """Add the rows that are missing; a recording that is there is not made again."""
    for seed in seeds:
        keys: list[Row] = [{"seed": seed, "pooled": pooled, "axis": axis} for pooled in POOLED for axis in SLICE_AXES]
        missing = [key for key in keys if not has(read(rows), key)]
        folder = work / f"gpt2-{seed}"
        if missing and not folder.exists():
            record(data, folder, seed)
        for key in missing:
            with Trace(folder) as trace:
                add(rows, key | measured(trace, key["axis"], key["pooled"]), unshown=["layers"])


def table(rows: Sequence[Row]) -> str:
    """Lay out kinds of layers by seed and axis, a loss per block; below them all layers, and what a fit chooses."""
    seeds = list(dict.fromkeys(row["seed"] for row in rows))
    found = {(row["seed"], row["pooled"], row["axis"]): row for row in rows}
    columns = [(seed, axis) for seed in seeds for axis in SET]
    lines = ["| layer (inputs x outputs; of both blocks) | "]
    lines[0] += " | ".join(f"{axis}, seed {seed}" for seed, axis in columns) + " | the fit takes |"
    lines.append("|---" * (len(columns) + 2) + "|")
    shapes = {name: layer["shape"] for name, layer in found[seeds[0], POOLED[0], "auto"]["layers"].items()}
    for end, role in ROLES.items():
        names = [name for name in shapes if name.endswith(end)]
        cells = [_cell(found[seed, POOLED[0], axis], names, "loss") for seed, axis in columns]
        taken = [_cell(found[seed, POOLED[0], "auto"], names, "axis") for seed in seeds]
        title = f"{role}, {' x '.join(map(str, shapes[names[0]]))}"
        lines.append(f"| {title} | {' | '.join(cells)} | {'; '.join(dict.fromkeys(taken))} |")
    for pooled, title in zip(POOLED, ("all", "all with `pooled=1`, the paper's"), strict=True):
        cells = [f"{found[seed, pooled, axis]['loss']:.3f}" for seed, axis in columns]
        taken = [f"{found[seed, pooled, 'auto']['loss']:.3f}" for seed in seeds]
        lines.append(f"| {title} | {' | '.join(cells)} | {'; '.join(taken)} |")
    right = [
        found[seed, POOLED[0], "auto"]["layers"][name]["axis"]
        == min(SET, key=lambda axis: found[seed, POOLED[0], axis]["layers"][name]["loss"])
        for seed in seeds
        for name in shapes
    ]
    random = [row["random"] for row in rows]
    lines += ["", f"the axis that loses less later is taken in {sum(right)} of {len(right)} layers"]
    lines.append(f"random bases lose {min(random):.3f} to {max(random):.3f}")
    return "\n".join(lines)


def _cell(row: Row, names: Sequence[str], what: str) -> str:
    """A value per block; one alone where they are the same word."""
    values = [row["layers"][name][what] for name in names]
    return ", ".join(dict.fromkeys(values) if what == "axis" else (f"{value:.3f}" for value in values))


def main() -> None:
    """Add the rows that are missing; or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--data", help="tinyshakespeare.txt")
    parser.add_argument("--work", type=Path, help="folder for recordings")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.data and options.work:
        torch.set_num_threads(1)
        run(options.rows, get("text_chars").load(options.data), options.work, options.seeds)
    if options.table:
        print(table(read(options.rows)))


if __name__ == "__main__":
    main()
