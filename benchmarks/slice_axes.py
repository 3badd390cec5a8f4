"""Along which axis of a transformer's matrices GradiVeQ's slices should lie: what bases lose on later iterations.

    python benchmarks/slice_axes.py --data tinyshakespeare.txt --work DIR [--seeds 0 1]

GPT-2 of transformers (2 layers, 64 wide, 4 heads, context 64, tied head, no dropout, random weights) on characters.
4 emulated nodes have 8 rows each. AdamW at 1e-3, 50 iterations of warm-up, weight decay 0.1, gradients clipped at
norm 1, 300 iterations, all of them recorded. Bases of K / d = 20 without whitening are fitted on iterations 50 to 149.
The table shows the share of the averaged gradient's energy that they lose on iterations 150 to 299. A random basis of
the same size loses 0.95.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.capture import EmulatedNodes
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.datasets import get
from gradlab.datasets.workload import Data
from gradlab.layout import Layer
from gradlab.learning.slice_pca import SLICE_AXES
from gradlab.trace import Trace

NODES, ROWS, STEPS, CONTEXT = 4, 8, 300, 64
WARMUP, RATE = 50, 1e-3
START, SAMPLES = 50, 100
POOLED = (8, 1)  # slices that share a basis; 1: bases of the first slice alone, the paper's


def model_of(vocabulary: int, seed: int) -> nn.Module:
    """Return GPT-2 with random weights, without dropout."""
    torch.manual_seed(seed)
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    size = {"vocab_size": vocabulary, "n_positions": CONTEXT, "n_embd": 64, "n_layer": 2, "n_head": 4}
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


def losses(trace: Trace, axis: str, pooled: int) -> dict[str, float]:
    """Return the loss on later iterations of every layer, and of "all" together."""
    settings = GradiVeQ.Settings(ratio=20, pooled=pooled, whitening=False, compressed_steps=0, slice_axis=axis)
    held = fit_gradiveq(trace, samples=SAMPLES, start=START, settings=settings).measured.holdout
    return {name: curve.loss for name, curve in held.groups.items()} | {"all": held.loss}


def table(trace: Trace) -> str:
    """Lay out layer by axis."""
    by_pooled = {pooled: {axis: losses(trace, axis, pooled) for axis in SLICE_AXES} for pooled in POOLED}
    shapes = {layer.name: _size(layer) for layer in trace.layers}
    lines = [f"{'layer (as stored)':36s}" + "".join(f"{axis:>9s}" for axis in SLICE_AXES)]
    for pooled, by_axis in by_pooled.items():
        shown = [*shapes, "all"] if pooled == POOLED[0] else ["all"]
        for name in (name for name in shown if name in by_axis[SLICE_AXES[0]]):
            label = f"{name.removeprefix('transformer.')} {shapes.get(name, f'layers, pooled={pooled}')}"
            lines.append(f"{label:36s}" + "".join(f"{by_axis[axis][name]:9.3f}" for axis in SLICE_AXES))
    return "\n".join(lines)


def _size(layer: Layer) -> str:
    return " x ".join(map(str, layer.shape))


def main() -> None:
    """Record each seed that is not there yet, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = get("text_chars").load(options.data)
    for seed in options.seeds:
        folder = options.work / f"gpt2-{seed}"
        if not folder.exists():
            record(data, folder, seed)
        with Trace(folder) as trace:
            print(f"seed {seed}\n{table(trace)}\n", flush=True)


if __name__ == "__main__":
    main()
