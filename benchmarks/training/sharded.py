"""Training under FSDP2 with each kind of its traffic compressed: losses and bytes, beside native training.

    python benchmarks sharded --data tinyshakespeare.txt --rows ROWS.jsonl [--ways native "parameters int8"]
        [--seeds 0] [--steps 300]
    python benchmarks sharded --rows ROWS.jsonl --table

nanoGPT's CPU configuration (804,096 parameters, AdamW) on two nodes of two ranks, 3 sequences each; a rank is a
process, and each block a unit. "gradients" compresses the reduce-scatter (int8) and what nodes exchange (int4), with
error feedback; "parameters FORMAT" the all-gathers, "rotated" by a Hadamard transform first, "differences" to what all
ranks hold. A row is a run: bytes that
a rank sends in a step, of gradients and of parameters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rows import Row, fill, grouped, markdown, options, read
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradlab.codec import seeded_generator
from gradlab.datasets import batches, build_optimizer, clip_gradients, get, learning_rate_at
from gradlab.layout import layers_of
from gradlab.plan import Plan, Wrap
from gradlab.runtime import FSDPCompression, compress_fsdp
from gradlab.training.settings import TrainSettings

RANKS, BATCH = 4, 3
WAYS = (
    "native",
    "parameters int8",
    "parameters int4",
    "parameters int4 rotated",
    "parameters int4 differences",
    "gradients",
    "gradients, parameters int8",
    "gradients, parameters int4 differences",
)
WRAPPERS = {"rotated": "hadamard", "differences": "ef21"}


def attach(way: str, model: nn.Module, mesh: DeviceMesh, optimizer: torch.optim.Optimizer) -> FSDPCompression | None:
    """Compress what the way says."""
    if way == "native":
        return None
    layers, options = layers_of(model), dict[str, Any](between=mesh["replicate"], optimizer=optimizer)
    plan = Plan(layers)
    if "gradients" in way:
        plan = Plan.uniform(layers, "block_scaled", dtype="int4")
        options |= {"within": mesh["shard"], "inside": Plan.uniform(layers, "block_scaled", dtype="int8")}
    if "parameters" in way:
        dtype, *how = way.partition("parameters ")[2].split()
        around = [Wrap(WRAPPERS[one]) for one in how]
        options["parameters"] = Plan.uniform(
            layers, "block_scaled", dtype=dtype, exchanges="parameters", wrappers=around
        )
    return compress_fsdp(model, plan, **options)


def trained(key: Row, chosen: argparse.Namespace) -> Row:
    settings = TrainSettings("text_chars", str(chosen.data), RANKS, chosen.steps, BATCH, seed=key["seed"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_worker, (key["way"], settings, folder), RANKS, start_method="fork")
        done: Row = json.loads(Path(folder, "0.json").read_text(encoding="utf-8"))
    return done


def _worker(rank: int, way: str, settings: TrainSettings, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("replicate", "shard"))
    workload = get(settings.workload)
    recipe, data = settings.applied_to(workload.recipe), workload.load(settings.data)
    model = workload.model(settings.seed)
    along = mesh if way == "native" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=along)
    fully_shard(model, mesh=along)
    optimizer = build_optimizer(recipe, model.parameters())
    state = attach(way, model, mesh, optimizer)
    generator = seeded_generator("augmentation", settings.seed, rank)
    order = batches(len(data.train_x), recipe.batch_size, rank, RANKS, settings.seed, recipe.steps)
    for step, indices in enumerate(order):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(recipe, step)
        optimizer.zero_grad()
        workload.loss(model(workload.augment(data.train_x[indices], generator)), data.train_y[indices]).backward()
        clip_gradients(recipe, model.parameters())
        optimizer.step()
    report = {} if state is None else state.report()
    model.eval()
    score = workload.score(model, data.test_x, data.test_y)
    if rank == 0:
        sent = {what: report.get(what, {}).get("wire_bytes") for what in ("parameters", "inside")}
        between = None if state is None else state.statistics.steps[-1].wire_bytes
        row = {"score": score, "between": between, **sent}
        Path(folder, "0.json").write_text(json.dumps(row), encoding="utf-8")
    dist.barrier()
    if state is not None:
        state.close()
    dist.destroy_process_group()


def table(rows: list[Row]) -> str:
    """Lay out losses by way, and bytes."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = []
    for at, here in sorted(grouped(rows, lambda row: ways.index(row["way"])).items()):
        scores = ", ".join(f"{row['score']:.3f}" for row in sorted(here, key=lambda row: row["seed"]))
        sent = [here[0][what] for what in ("parameters", "inside")]
        lines.append([ways[at], scores, *("as they are" if one is None else f"{one:,.0f}" for one in sent)])
    return markdown(("compressed", "validation loss", "parameters", "gradients in a node"), lines)


def main() -> None:
    torch.set_num_threads(1)  # a process with threads cannot fork
    chosen = options(__doc__, data=Path, rows=Path, ways=WAYS, seeds=[0], steps=300, table=False)
    keys = ({"way": way, "seed": seed, "steps": chosen.steps} for seed, way in product(chosen.seeds, chosen.ways))
    if not chosen.table:
        fill(chosen.rows, keys, lambda key: trained(key, chosen))
    print(table(read(chosen.rows)))
