"""What GradiVeQ's bases lose on later iterations, by slice size K: fitted on one slice, on several, and random ones.

    python benchmarks/slice_size.py --data cifar10.npz --work DIR --rows rows.jsonl [--images 16 32] [--seeds 0]
    python benchmarks/slice_size.py --rows rows.jsonl --table

The task of `accuracy.py` at 16 images per rank: ResNet-8, 4 emulated nodes, a rate of 0.2 that falls over 1000
iterations; on images halved to 16 x 16, as there, and on images as they are. After the 50 iterations that are dense
there, the next 150 are recorded. Bases of d = K / 20 without whitening are fitted on the first 100 of these. The table
shows the share of the averaged gradient's energy that they lose on the 50 after. All K are compared on the same layers,
convolutions of at least 4096 elements. Elements that fill no slice travel dense, and lose nothing. One line of JSON per
fit; what is in --rows is not done again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import emulated
import torch
from accuracy import CONVOLUTIONS, WORKLOAD, resnet8
from rows import Row, add, has, read

from gradlab.analysis.fit.gradiveq import fit_gradiveq
from gradlab.analysis.measure.holdout import holdout_by_age, random_basis_plan
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.trace import Trace

RANKS, START, SAMPLES, LATER = 4, 50, 100, 50
SIZES, RATIO = (128, 512, 1024, 2048, 4096), 20
POOLED = (1, 16)  # slices that a layer's basis is fitted on: the first, as the paper does; as accuracy.py's methods do
RECIPE = replace(WORKLOAD.recipe, learning_rate=0.2, batch_size=16, steps=1000, schedule="cosine")


def record(data: Any, folder: Path, images: int, seed: int) -> None:
    """Train densely, and record what bases are fitted on and what they are judged by."""
    task = replace(resnet8(RECIPE, RANKS), full_size=images == 32)
    emulated.record(task, data, folder, seed, start=START, every=1, count=SAMPLES + LATER)


def later_loss(trace: Trace, size: int, pooled: int) -> Row:
    """Share of energy lost on the later iterations, by fitted and by random bases of the same size."""
    settings = GradiVeQ.Settings(ratio=RATIO, slice_size=size, pooled=pooled, whitening=False, compressed_steps=0)
    fit = fit_gradiveq(trace, samples=SAMPLES, start=0, settings=settings, roles=CONVOLUTIONS)
    compared = {layer.name: layer.numel for layer in trace.layers if layer.numel >= max(SIZES)}
    groups = tuple(group for group in fit.plan.groups if group.name in compared)
    plan = replace(fit.plan, groups=groups, learned={group.name: fit.plan.learned[group.name] for group in groups})
    random = random_basis_plan(plan, seed=0)
    return {
        "dimension": fit.measured.layers[groups[0].name].dimension,
        "layers": [group.name for group in groups],
        "in_slices": sum(numel - numel % size for numel in compared.values()) / sum(compared.values()),
        "loss": holdout_by_age(trace, plan, start=SAMPLES).loss,
        "random": holdout_by_age(trace, random, start=SAMPLES).loss,
    }


def table(rows: Sequence[Row]) -> str:
    """Losses by K, for each size of images those of seeds beside each other."""
    sizes = sorted({row["images"] for row in rows})
    heads = [f"{images} x {images}: first slice | pooled | random" for images in sizes]
    lines = ["| K | " + " | ".join(heads) + " |", "| ---: |" + " ---: | ---: | ---: |" * len(sizes)]
    for size in sorted({row["slice_size"] for row in rows}):
        cells = []
        for images in sizes:
            here = [row for row in rows if (row["images"], row["slice_size"]) == (images, size)]
            first, pooled = ([row for row in here if row["pooled"] == slices] for slices in POOLED)
            cells += [_beside(first, "loss"), _beside(pooled, "loss"), _beside(pooled, "random")]
        lines.append(f"| {size} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside(rows: Sequence[Row], name: str) -> str:
    return ", ".join(f"{row[name]:.2f}" for row in rows)


def main() -> None:
    """Add the rows that are missing; or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="cifar10.npz")
    parser.add_argument("--work", type=Path, help="folder of the recordings, which are kept")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--images", type=int, nargs="+", default=[16, 32], choices=[16, 32])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    torch.set_num_threads(1)
    data = WORKLOAD.load(chosen.data, test_limit=1)
    for images in chosen.images:
        for seed in chosen.seeds:
            folder = chosen.work / f"images-{images}-{seed}"
            if not folder.exists():
                record(data, folder, images, seed)
            with Trace(folder) as trace:
                for size in SIZES:
                    for pooled in POOLED:
                        key = {"images": images, "seed": seed, "slice_size": size, "pooled": pooled}
                        if not has(read(chosen.rows), key):
                            add(chosen.rows, key | later_loss(trace, size, pooled))


if __name__ == "__main__":
    main()
