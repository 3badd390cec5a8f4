"""All compressors beside each other: replayed on one recording, then trained; does the replay tell who trains best?

    python benchmarks methods --data cifar10.npz --record TRACE                  # a dense run, 4 nodes
    python benchmarks methods --trace TRACE --replay REPLAY.jsonl                # every method
    python benchmarks methods --data cifar10.npz --trace TRACE --train ROWS.jsonl [--methods top-k] [--seeds 0 1]
                                  [--steps 600]
    python benchmarks methods --replay REPLAY.jsonl --train ROWS.jsonl --table
    --task fashion_mnist with any of these

4 ranks with 16 images each, SGD with momentum 0.9, cosine schedule. "cifar10": 16 x 16 and ResNet-8 (75,290
parameters); "fashion_mnist": the workload's own network (1,663,370 parameters). Methods compress all matrices, at about
1.25 bits per value where they can; vectors are dense, unless a title says "every tensor". All start after 50 dense
iterations and train at one learning rate, but those whose updates are signs, which get a hundredth of it. "frozen"
applies no gradient to what the others compress. A row is a replay or a run; one that is there is not done again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import emulated
import torch
from accuracy import WORKLOAD, resnet8
from compared import Compared, published
from rows import Row, fill, finite, options, read

from gradlab import codecs, datasets
from gradlab.analysis.intervals import rank_correlation
from gradlab.analysis.replay import replay
from gradlab.codec import About, Batch, Bytes, Codec, Context, Deferred, Exchanged, PlanDefaults, Tensors
from gradlab.collectives import Coroutine
from gradlab.layout import Layer, layers_of
from gradlab.plan import FEEDBACK, Wrap
from gradlab.roles import ROLES
from gradlab.trace import Trace

WARMUP, BATCH, RANKS, STEPS = 50, 16, 4, 600
# Learning rates of dense training.
RATES = {"cifar10": 0.1, "fashion_mnist": 0.02}


@codecs.register
class Frozen(Codec):
    name = "frozen"
    about = About("control", "0")
    defaults = PlanDefaults(error_feedback=False)

    @dataclass(frozen=True)
    class Settings:
        pass

    def exchange(self, grads: Batch, state: Tensors, context: Context) -> Coroutine[Exchanged]:
        yield ()
        nothing = {name: torch.zeros_like(grad) for name, grad in grads.items()}
        return Exchanged(nothing, Deferred(grads, lambda: nothing))

    def forecast(self, layers: Sequence[Layer], world_size: int, state: Tensors | None = None) -> Bytes:
        return Bytes(0, 0)


# All methods compress matrices alone, layer by layer unless one group of all layers is what they are.
SCOPE: dict[str, Any] = {
    "minimum_dimensions": 2,
    "minimum_numel": 256,
    "roles": ("convolution", "linear"),
    "group_bytes": 0,
}
EVERY_TENSOR = {"minimum_dimensions": 0, "minimum_numel": 1, "roles": list(ROLES), "group_bytes": 2**62}
BOTH_WAYS = (*FEEDBACK, Wrap("two_way"))
PCA = {"ratio": 25, "pooled": 16, "whitening": False, "sample_steps": 50}
RAMP = {"sparsity_warmup": {"steps": 100}}
METHODS: dict[str, Compared] = {
    "dense": Compared("identity"),
    "frozen": Compared("frozen"),
    "float16": Compared("cast"),
    "natural": Compared("natural"),
    "int8": Compared("block_scaled"),
    "fp8": Compared("block_scaled", {"dtype": "float8_e4m3fn"}),
    "LoCo, no resets": published("LoCo", wrapper_settings={"error_feedback": {"reset_steps": 0}}),
    "QSGD 4 bits, max norm": published("QSGD, max norm", bits=4),
    "QSGD 2 bits, max norm": published("QSGD, max norm", bits=2),
    "TernGrad": published("TernGrad"),
    "sign, both ways": Compared("sign", {}, BOTH_WAYS),
    "signSGD": published("signSGD", rate=0.01),
    "1-bit SGD": published("1-bit SGD"),
    "top-k": Compared("topk", {"density": 0.026}),
    "top-k, no feedback": Compared("topk", {"density": 0.026}, ()),
    "global top-k 2.6 %": published("global top-k", density=0.026),
    "Rethink-GS 2.6 %": published("Rethink-GS", density=0.026),
    "sampled threshold": Compared("sampled_threshold", {"density": 0.026}),
    "DGC 2.6 %, 100 steps of ramp": published("DGC", momentum=False, wrapper_settings=RAMP, density=0.026),
    "random-k": Compared("random_k", {"density": 0.039}),
    "random-k, unbiased": Compared("random_k", {"density": 0.039, "unbiased": True}, ()),
    "CLT-k": Compared("clt_k", {"density": 0.035}),
    "CLT-k int8": Compared("clt_k", {"density": 0.1, "values": "int8"}),
    "ScaleCom 3.5 %": published("ScaleCom", density=0.035),
    "DCT top-k": Compared("dct_topk", {"chunk": 8, "count": 2}),
    "DeMo, 2 of 8": published("DeMo", momentum=False, rate=0.01, chunk=8, count=2),
    "PowerSGD rank 2": published("PowerSGD", rank=2),
    "PowerSGD rank 4, alternating": published("PowerSGD", rank=4, alternating=True),
    **{
        f"ecsq {bits:g} bits": Compared("ecsq", {"bits": bits, "group_bytes": 2**62})
        for bits in (1.25, 0.5, 0.32, 0.16)
    },
    **{
        f"ecsq {bits:g} bits, both ways": Compared("ecsq", {"bits": bits, "group_bytes": 2**62}, BOTH_WAYS)
        for bits in (0.5, 0.25)
    },
    **{
        f"ecsq {bits:g} bits, every tensor": Compared("ecsq", {"bits": bits, **EVERY_TENSOR})
        for bits in (0.5, 0.32, 0.16)
    },
    "L-GreCo, top-k 2.6 %": Compared("topk", {"density": 0.026}, by_layer=True),
    "L-GreCo, PowerSGD rank 2": Compared("powersgd", {"rank": 2}, by_layer=True),
    "GradiVeQ, half PCA": Compared("gradiveq", {**PCA, "complement": 0.5, "compressed_steps": 0}, FEEDBACK),
}


def task_of(name: str, method: Compared, steps: int) -> emulated.Task:
    """Make a task with a method's share of the learning rate."""
    workload, momentum = datasets.get(name), 0.9 if method.momentum else 0.0
    fixed = {"batch_size": BATCH, "warmup_steps": 0, "schedule": "cosine", "momentum": momentum}
    recipe = replace(workload.recipe, learning_rate=RATES[name] * method.rate, steps=steps, **fixed)
    return resnet8(recipe, RANKS) if workload is WORKLOAD else emulated.Task(workload, recipe, RANKS)


def replay_row(trace: Trace, method: Compared) -> Row:
    plan = method.fitted(trace, 0, trace.layers, **SCOPE)
    replayed = replay(trace, plan)
    steps = replayed.compressed[-40:]  # what is fitted or fed back has settled
    compressed = {name for group in plan.compressed_groups for name in group.layers} or {x.name for x in trace.layers}
    dense = 4 * sum(layer.numel for layer in trace.layers if layer.name not in compressed)
    numel = sum(layer.numel for layer in trace.layers if layer.name in compressed)
    payload = statistics.fmean(step.payload_bytes_mean for step in steps)
    return {
        "codec": next(group.codec for group in plan.groups),
        "bits": 8 * (payload - dense) / numel,
        "payload": payload,
        "wire": statistics.fmean(step.wire_bytes_mean for step in steps),
        "contribution_error": statistics.median(step.contribution_error or 0.0 for step in steps),
        "aggregate_error": statistics.median(step.aggregate_error or 0.0 for step in steps),
        "cosine": statistics.median(step.cosine or 0.0 for step in steps),
        "memory": replayed.memory,
        "windows": [one.to_json() for one in replayed.window_errors],
    }


def joined(replayed: Sequence[Row], trained: Sequence[Row]) -> dict[str, tuple[Row, list[Row]]]:
    pairs = {}
    for row in replayed:
        if runs := [run for run in trained if run["method"] == row["method"]]:
            pairs[row["method"]] = (row, runs)
    return pairs


def table(replayed: Sequence[Row], trained: Sequence[Row]) -> str:
    lines = [
        "method                        bits/value  wire kB  error rank  error mean  cosine   loss           accuracy"
    ]
    pairs = joined(replayed, trained)
    for name, (row, runs) in sorted(pairs.items(), key=lambda item: mean_loss(item[1][1])):
        losses = ", ".join("-" if run["loss"] is None else f"{run['loss']:.3f}" for run in runs)
        lines.append(
            f"{name:30s} {row['bits']:9.2f}  {row['wire'] / 1e3:7.1f}  {row['contribution_error']:10.3f}  "
            f"{row['aggregate_error']:10.3f}  {row['cosine']:6.3f}   {losses:13s}  "
            f"{statistics.fmean(100 * run['accuracy'] for run in runs):6.2f} %"
        )
    every = [name for name in pairs if name not in ("dense", "frozen")]
    some = {"all": every, "at 1 to 2 bits": [name for name in every if pairs[name][0]["bits"] < 2]}
    for key, (what, names) in product(("contribution_error", "aggregate_error", "cosine"), some.items()):
        if len(names) > 2:
            sign = -1 if key == "cosine" else 1
            rho = rank_correlation([sign * pairs[n][0][key] for n in names], [mean_loss(pairs[n][1]) for n in names])
            lines.append(f"Spearman of {key} with final loss, {what} ({len(names)}): {rho}")
    return "\n".join(lines)


def mean_loss(runs: Sequence[Row]) -> float:
    return statistics.fmean(math.inf if run["loss"] is None else run["loss"] for run in runs)


def main() -> None:
    files = dict.fromkeys(("record", "trace", "replay", "train"), Path)
    sizes = {"methods": list(METHODS), "seeds": [0, 1], "steps": STEPS}
    chosen = options(__doc__, task=RATES, data=str, **files, **sizes, table=False)
    torch.set_num_threads(1)
    if chosen.table:
        print(table(read(chosen.replay), read(chosen.train)))
        return
    trace = Trace(chosen.trace) if chosen.trace else None
    data = datasets.get(chosen.task).load(chosen.data) if chosen.data else None
    if chosen.record:
        dense = task_of(chosen.task, METHODS["dense"], STEPS)
        emulated.record(dense, data, chosen.record, 0, start=100, every=1, count=100)
    if chosen.replay and trace is not None:
        keys = ({"method": name, "settings": one.codec_settings} for name, one in METHODS.items())
        fill(chosen.replay, keys, lambda key: replay_row(trace, METHODS[key["method"]]))
    if not chosen.train:
        return

    def run(key: Row) -> Row:
        method = METHODS[key["method"]]
        task = task_of(chosen.task, method, chosen.steps)
        plan = method.fitted(trace, WARMUP, layers_of(task.model(key["seed"])), **SCOPE)
        row = emulated.train(task, plan, data, key["seed"])
        return {"accuracy": row["score"], "loss": finite(row["loss"])} | {
            x: row[x] for x in ("ratio", "payload", "wire")
        }

    keys = [{"method": name, "seed": x, "steps": chosen.steps} for x in chosen.seeds for name in chosen.methods]
    fill(chosen.train, keys, run)
