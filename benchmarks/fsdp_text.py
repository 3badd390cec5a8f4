"""A small GPT under FSDP2 on two nodes of two ranks: native HSDP beside what nodes and ranks exchange compressed.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/fsdp_text.py --data tinyshakespeare.txt
        [--steps 300] [--seeds 0 1] [--ways "native HSDP" int8] [--rows ROWS.jsonl]
    python benchmarks/fsdp_text.py --table [--rows ROWS.jsonl]

The workload `text_chars` (nanoGPT's Shakespeare by characters, 804,096 parameters, AdamW), every block and the rest a
unit of `fully_shard`, 3 rows per rank and step, so that four ranks share nanoGPT's batch. Compression begins with the
first step. Rows, one line of JSON each, are added as runs finish; what is there is not done again.

Bytes are those that one rank sends between nodes in a step, as the collectives' algorithms count them, beside an
all-reduce of 32 bits and half of it. Dense in 16 bits is the cast: an all-to-all and a gather, summed in float32.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, add, has, read
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradlab.datasets import get
from gradlab.datasets.optimizer import build_optimizer, clip_gradients
from gradlab.datasets.recipe import learning_rate_at
from gradlab.datasets.sampling import batches
from gradlab.layout import layers_of
from gradlab.plan import Plan, named_plan
from gradlab.runtime import compress_fsdp

WORKLOAD = get("text_chars")
ROWS = Path(__file__).parent / "results" / "fsdp-text.jsonl"
NODES, BATCH = 2, 3


@dataclass(frozen=True)
class Way:
    """How gradients are exchanged: a codec or method with settings between nodes, and perhaps one inside; "": neither.

    native: FSDP's own, over the whole mesh.
    """

    codec: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    inside: str = ""
    inside_settings: Mapping[str, Any] = field(default_factory=dict)
    native: bool = False


WAYS: dict[str, Way] = {
    "native HSDP": Way(native=True),
    "identity": Way(),
    "cast, float32 sums": Way("cast", {"dtype": "bfloat16", "accumulate": "float32"}),
    "int8": Way("block_scaled", {"dtype": "int8"}),
    "two levels, 8 and 4 bits": Way("block_scaled", {"dtype": "int4"}, "block_scaled", {"dtype": "int8"}),
    "PowerSGD rank 4": Way("PowerSGD", {"rank": 4}),
    "top-k 1 %": Way("topk", {"density": 0.01}),
    "8 bits inside alone": Way("", {}, "block_scaled", {"dtype": "int8"}),
}


def train(way: Way, data: Any, seed: int, steps: int) -> Row:
    """One run on all ranks; its row."""
    mesh = init_device_mesh("cpu", (NODES, dist.get_world_size() // NODES), mesh_dim_names=("replicate", "shard"))
    recipe = replace(WORKLOAD.recipe, batch_size=BATCH, steps=steps)
    model = WORKLOAD.model(seed)
    layers = layers_of(model)
    for block in model.blocks:
        fully_shard(block, mesh=mesh if way.native else mesh["shard"])
    fully_shard(model, mesh=mesh if way.native else mesh["shard"])
    optimizer = build_optimizer(recipe, model.parameters())
    state = None
    if not way.native:
        plans = [
            named_plan(layers, codec, **settings) if codec else Plan(layers)
            for codec, settings in ((way.codec, way.settings), (way.inside, way.inside_settings))
        ]
        second = {"within": mesh["shard"], "inside": plans[1]} if way.inside else {}
        state = compress_fsdp(model, plans[0], between=mesh["replicate"], optimizer=optimizer, **second)
    losses = []
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step, batch in enumerate(batches(len(data.train_x), BATCH, rank, ranks, seed, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(recipe, step)
        optimizer.zero_grad()
        loss = WORKLOAD.loss(model(data.train_x[batch]).float(), data.train_y[batch])
        loss.backward()
        clip_gradients(recipe, model.parameters())
        optimizer.step()
        losses.append(float(loss.detach()))
    whole = WORKLOAD.model(seed)
    whole.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    mean = torch.tensor(statistics.fmean(losses[-50:]))
    dist.all_reduce(mean)
    row: Row = {"validation": WORKLOAD.score(whole, data.test_x, data.test_y), "loss": float(mean) / ranks}
    if state is not None:
        last = state.statistics.steps[-1]
        row |= {"payload": last.payload_bytes, "wire": last.wire_bytes}
        row |= {} if state.inside is None else {"inside": state.inside.report()}
        state.close()
    return row


def table(rows: list[Row]) -> str:
    """One line per way: validation loss by seed, the mean difference to native HSDP, and bytes."""
    native = {row["seed"]: row["validation"] for row in rows if row["way"] == "native HSDP"}
    dense = next((row["wire"] for row in rows if row["way"] == "identity" and "wire" in row), None)
    heads, widths = ("loss", "to native", "kB between", "of 32 bits", "of 16 bits"), (16, 10, 11, 11, 11)
    lines = [f"{'way':26s} " + " ".join(f"{head:>{width}s}" for head, width in zip(heads, widths, strict=True))]
    for name in WAYS:
        runs = [row for row in rows if row["way"] == name]
        if not runs:
            continue
        reached = ", ".join(f"{row['validation']:.4f}" for row in runs)
        pairs = [row["validation"] - native[row["seed"]] for row in runs if row["seed"] in native]
        gap = f"{statistics.fmean(pairs):+.4f}" if pairs else "-"
        sizes = ["-", "-", "-"]
        wire = next((run["wire"] for run in runs if "wire" in run), None)
        if wire is not None and dense is not None:
            sizes = [f"{wire / 1e3:.1f}", f"1/{dense / wire:.1f}", f"1/{dense / wire / 2:.1f}"]
        cells = zip((reached, gap, *sizes), widths, strict=True)
        lines.append(f"{name:26s} " + " ".join(f"{cell:>{width}s}" for cell, width in cells))
    return "\n".join(lines)


def main() -> None:
    """Train on all ranks, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--table", action="store_true")
    chosen = parser.parse_args()
    if chosen.table:
        print(table(read(chosen.rows)))
        return
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    data = WORKLOAD.load(chosen.data)
    for seed in chosen.seeds:
        for name in chosen.ways:
            key = {"way": name, "seed": seed, "steps": chosen.steps}
            done = has(read(chosen.rows), key)
            dist.barrier()  # before anybody adds the row
            if done:
                continue
            row = train(WAYS[name], data, seed, chosen.steps)
            if dist.get_rank() == 0:
                finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
                add(chosen.rows, key | finite)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
