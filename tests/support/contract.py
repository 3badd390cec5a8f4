"""The contract every codec keeps, as tasks for real ranks and helpers for the lockstep side."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab import codecs
from gradlab.codec import Batch, Context, Exchanged, Tensors, exchange_group
from gradlab.codec.kept import state_problem
from gradlab.codec.settings import build_settings
from gradlab.collectives import LockstepResult, Mean, observed, run_lockstep
from gradlab.plan import FEEDBACK, Group, Plan, Schedule, state_bytes
from gradlab.runtime import CompressionState, compression_hook
from support.pool_groups import SPARE
from support.prescribed import SHAPES, Prescribed, gradients, layers

LEARNS_QUICKLY = {
    "density": 0.07,
    "training_steps": 2,
    "optimizer": "adam",
    "loss": "mean",
    "most_error": 1e9,
}
STARTS_BARE = ("lgc_ring", "lgc_server")  # that learn while they run
AVERAGES_LATER = ("lgc_ring",)  # not in the first exchange
SETTINGS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.07},
    "powersgd": {"rank": 2},
    "qsgd": {"bits": 3, "bucket_size": 100},
    "nuqsgd": {"bits": 3, "bucket_size": 100},
    "sign": {"block_size": 100},
    "threshold": {"density": 0.07},
    "sampled_threshold": {"density": 0.07},
    "random_k": {"density": 0.07},
    "clt_k": {"density": 0.07},
    "dct_topk": {"chunk": 12, "count": 5},
    "chunk_topk": {"chunk": 64, "count": 5},
    "block_scaled": {"block_size": 100},
    "powersgd, alternating": {"rank": 2, "alternating": True},
    "terngrad, shared scale": {"shared_scale": True},
    "intsgd, running": {"bits": 32, "scale": "running", "random": False},
    "topk, smallest coding": {"density": 0.07, "index_coding": "smallest"},
    "clt_k, int8": {"density": 0.07, "values": "int8", "leader": "random", "selection": "chunks"},
    "cast, stochastic": {"dtype": "bfloat16", "stochastic": True},
    "block_scaled, fp8": {"dtype": "float8_e4m3fn", "stochastic": True},
    "block_scaled, int4": {"dtype": "int4", "scale": 3.0},
    "block_scaled, mxfp4": {"dtype": "mxfp4"},
    "block_scaled, nvfp4": {"dtype": "nvfp4", "stochastic": True},
    # Within four steps they learn, twice, and compress with that.
    "lgc_ring": {**LEARNS_QUICKLY, "normalise": "layer", "index_coding": "packed"},
    "lgc_ring, by value": {**LEARNS_QUICKLY, "order": "value"},
    "lgc_server": {**LEARNS_QUICKLY, "normalise": "layer"},
    "lgc_server, shared": {**LEARNS_QUICKLY, "positions": "shared"},
    # Within four steps it compresses with what it learned, samples, fits, and compresses with that.
    "gradiveq": {
        "loss_threshold": 0.3,
        "slice_size": 50,
        "sample_steps": 2,
        "compressed_steps": 1,
        "complement": 0.5,
        "monitor": "normalised",
        "monitor_threshold": 2.0,
    },
}
# The same codecs with messages that go round a ring: "<codec>, ring".
for _codec in ("identity", "qsgd", "gradiveq"):
    SETTINGS[f"{_codec}, ring"] = {**SETTINGS.get(_codec, {}), "ring": True}


def cases() -> list[str]:
    """Every codec in gradlab/codecs, found by itself, and further settings of some: "<codec>, <what>"."""
    return sorted({*codecs.names(), *SETTINGS})


def codec_of(case: str) -> str:
    """The codec's name of a case: what stands before a comma."""
    return case.partition(",")[0]


def sizes_vary(case: str) -> bool:
    """Whether the bytes of a case depend on the gradients' values, so that a forecast is an estimate."""
    method = codecs.get(codec_of(case))
    return method(build_settings(method, SETTINGS.get(case, {}))).traits.varying


STEADY: dict[str, dict[str, Any]] = {"gradiveq": {"compressed_steps": 0, "monitor": "off"}}


@functools.cache
def learned(codec: str, members: tuple[Any, ...]) -> Tensors:
    """What a codec that learns gets: fitted on averaged gradients that the test does not use."""
    method = codecs.get(codec_of(codec))
    samples = {
        layer.name: torch.stack([gradients({layer.name: layer.shape}, 0, 500 + t)[layer.name] for t in range(12)])
        for layer in members
    }
    return method(build_settings(method, SETTINGS.get(codec, {}))).fit(members, samples).learned


def plan_for(
    codec: str,
    grouping: str,
    feedback: bool,
    warmup_steps: int = 0,
    shapes: Mapping[str, Sequence[int]] = SHAPES,
    steady: bool = False,
) -> Plan:
    """A plan over `shapes`: one group per layer, or one over all layers (so that it spans buckets).

    steady: a codec that works in phases stays in that of compression.
    """
    settings = SETTINGS.get(codec, {}) | (STEADY.get(codec_of(codec), {}) if steady else {})
    everything = layers(shapes)
    sets = [everything] if grouping == "model" else [(layer,) for layer in everything]
    groups, kept = [], {}
    for members in sets:
        name = "model" if grouping == "model" else members[0].name
        tensors = learned(codec, members)
        if codecs.get(codec_of(codec)).about.learns and not tensors and codec_of(codec) not in STARTS_BARE:
            continue  # smaller than a slice: dense
        groups.append(
            Group(
                name,
                tuple(m.name for m in members),
                codec_of(codec),
                settings,
                wrappers=FEEDBACK if feedback else (),
            )
        )
        if tensors:
            kept[name] = tensors
    return Plan(everything, tuple(groups), Schedule(warmup_steps), seed=3, learned=kept)


def batch_of(plan: Plan, group: Group, grads: Tensors) -> Batch:
    """A group's gradients, with the roles that the plan gives the layers."""
    return Batch.of({name: grads[name] for name in group.layers}, plan.members(group))


def lockstep(
    plan: Plan, world_size: int, steps: int, make: Callable[[int, int], Tensors]
) -> list[dict[str, list[LockstepResult[Exchanged]]]]:
    """Run a plan's groups over `steps` iterations in this process: per step, per group, one result per rank."""
    states: dict[str, list[Tensors]] = {group.name: [{}] * world_size for group in plan.groups}
    history = []
    for step in range(steps):
        grads = [make(rank, step) for rank in range(world_size)]
        results = {}
        for group in plan.groups:
            context = Context(0, world_size, step, group.name, plan.seed)
            coroutines = [
                exchange_group(
                    plan.build(group),
                    batch_of(plan, group, grads[rank]),
                    states[group.name][rank],
                    replace(context, rank=rank),
                )
                for rank in range(world_size)
            ]
            results[group.name] = run_lockstep(coroutines)
            states[group.name] = [result.value.state for result in results[group.name]]
            codec = plan.build(group)
            for rank, state in enumerate(states[group.name]):
                kept = codec.kept(plan.members(group), rank, world_size, group.name)
                assert state_problem(kept, state) is None
                assert state.keys() == states[group.name][0].keys()  # ranks that resume compare them
        history.append(results)
    return history


def held_bytes(states: Iterable[Tensors]) -> dict[str, int]:
    """Bytes by entry of a rank's states of all groups."""
    found = Counter[str]()
    for state in states:
        for key, tensor in state.items():
            found[key.rpartition("/")[2]] += tensor.nbytes
    return {what: nbytes for what, nbytes in found.items() if nbytes}


def keeps_what_was_counted(plan: Plan, history: Sequence[dict[str, list[LockstepResult[Exchanged]]]]) -> bool:
    """Whether ranks keep after a step the state that is counted beforehand; of factors that alternate, the larger."""
    ranks = range(len(next(iter(history[-1].values()))))
    steps = [[held_bytes(done[rank].value.state for done in step.values()) for rank in ranks] for step in history[-2:]]
    last = [max(step, key=lambda kept: sum(kept.values())) for step in zip(*steps, strict=True)]
    return last == [state_bytes(plan, len(ranks), rank) for rank in ranks]


def together(cases: Sequence[str], grouping: str, feedback: bool) -> Plan:
    """One plan of several cases, each with layers "<number>_<name>" and groups "<case>/<name>" of its own."""
    every, groups, learned_by = [], [], {}
    for number, case in enumerate(cases):
        plan = plan_for(case, grouping, feedback, shapes=numbered(number))
        every += plan.layers
        for group in plan.groups:
            groups.append(replace(group, name=f"{case}/{group.name}"))
            if group.name in plan.learned:
                learned_by[groups[-1].name] = plan.learned[group.name]
    return Plan(tuple(every), tuple(groups), seed=3, learned=learned_by)


SOME = ("conv", "wide", "vector", "scalar", "empty")


def numbered(number: int) -> dict[str, tuple[int, ...]]:
    """Shapes of one case of several."""
    return {f"{number}_{name}": SHAPES[name] for name in SOME}


def all_numbered(cases: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shapes of several cases."""
    return {name: shape for number in range(len(cases)) for name, shape in numbered(number).items()}


class Part(NamedTuple):
    """What one rank holds after an exchange."""

    mean: Tensors
    state: Tensors


STEPS = 3  # of the engine against lockstep


def lockstep_part(group: dist.ProcessGroup, *run: Any) -> list[dict[str, Part]]:
    """This rank's part of the prescribed run, per step and group: rank 0 computes it, and hands the parts out."""
    received: list[Any] = [None]
    parts = prescribed_run(dist.get_world_size(group), *run) if dist.get_rank(group) == 0 else None
    dist.scatter_object_list(received, parts, src=0, group=group)
    return received[0]


def prescribed_run(
    world_size: int, cases: Sequence[str], grouping: str, dtype: torch.dtype
) -> list[list[dict[str, Part]]]:
    """What prescribed gradients lead to in lockstep, by rank, step and group."""
    plan, shapes = together(cases, grouping, feedback=True), all_numbered(cases)
    history = lockstep(plan, world_size, STEPS, lambda rank, step: gradients(shapes, rank, step, dtype))
    return [
        [
            {name: Part(by_rank[rank].value.mean, by_rank[rank].value.state) for name, by_rank in step.items()}
            for step in history
        ]
        for rank in range(world_size)
    ]


@functools.cache
def asks_for_means(case: str) -> bool:
    """Whether a codec ever asks for a Mean, whose summation order the backend may choose."""
    plan, grads, seen = plan_for(case, "layer", True), gradients(SHAPES, 0, 0), []
    for group in plan.groups:
        own = batch_of(plan, group, grads)
        run_lockstep([observed(exchange_group(plan.build(group), own, {}, Context(0, 1, 0, group.name)), seen)])
    return codec_of(case) in AVERAGES_LATER or any(isinstance(request, Mean) for request in seen)


def engine_against_lockstep(
    group: dist.ProcessGroup, cases: Sequence[str], grouping: str, deterministic: bool, dtype: str
) -> dict[str, Any]:
    """Train a prescribed model under DDP on several buckets, each case's layers by its codec, beside lockstep.

    Returns:
        By case, what holds; and bytes by step, counted and as forecast.
    """
    rank, world_size, kind = dist.get_rank(group), dist.get_world_size(group), getattr(torch, dtype)
    plan, shapes = together(cases, grouping, feedback=True), all_numbered(cases)
    reference = lockstep_part(group, tuple(cases), grouping, kind)
    model = DistributedDataParallel(Prescribed(shapes, kind), process_group=group, bucket_cap_mb=0.01)
    found = {case: {"bitwise": True, "finite": True, "state_bitwise": True, "largest": 0.0} for case in cases}
    options = {"check_requests": True, "segment_bytes": 4096, "process_group": SPARE.get(world_size)}
    with CompressionState(plan, model, deterministic=deterministic, **options) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            model(gradients(shapes, rank, step, kind)).backward()
            for name, result in reference[step].items():
                _compare(found[name.partition("/")[0]], model.module, result.mean)
        got = dict(state.state_dict()["states"])
        held = sum(tensor.nbytes for tensor in got.values())
        # A group of codec identity is plainly dense in the engine: it keeps no residual, which would be zero.
        for compressed in plan.compressed_groups:
            for key, value in reference[-1][compressed.name].state.items():
                case = found[compressed.name.partition("/")[0]]
                case["state_bitwise"] &= torch.equal(got.pop(f"{compressed.name}::{key}"), value)
        payload = [record.payload_bytes for record in state.statistics.steps]
    befores = [{}, *({name: result.state for name, result in step.items()} for step in reference[:-1])]
    for number, case in enumerate(cases):
        own = [getattr(model.module, name).grad.float().reshape(-1) for name in numbered(number)]
        found[case] |= {"ranks_agree": agree(torch.cat(own), group)}
    forecast = [plan.payload_bytes(world_size, states=states) for states in befores]
    kept = held, sum(state_bytes(plan, world_size, rank).values())
    return {"cases": found, "more_states": sorted(got), "payload": payload, "forecast": forecast, "kept": kept}


def _compare(found: dict[str, Any], module: torch.nn.Module, means: Tensors) -> None:
    for name, expected in means.items():
        got = getattr(module, name).grad
        found["bitwise"] &= torch.equal(got, expected)
        found["finite"] &= bool(got.isfinite().all())
        scale = float(expected.abs().max()) if expected.numel() else 0.0
        gap = float((got - expected).abs().max()) if expected.numel() else 0.0
        found["largest"] = max(found["largest"], gap / scale if scale else gap)


def non_finite(group: dist.ProcessGroup, cases: Sequence[str], grouping: str) -> list[dict[str, Any]]:
    """Rank 1 gets a NaN in one case's layer, then in another's: all ranks see it, no state moves, the rest is sound."""
    rank, plan, shapes = dist.get_rank(group), together(cases, grouping, feedback=True), all_numbered(cases)
    model = DistributedDataParallel(Prescribed(shapes), process_group=group, bucket_cap_mb=0.01)
    bad = {2: "0_conv", 3: f"{len(cases) - 1}_conv"}
    with CompressionState(plan, model, process_group=SPARE.get(dist.get_world_size(group))) as state:
        model.register_comm_hook(state, compression_hook)
        outcomes = []
        for step in range(5):
            grads = gradients(shapes, rank, step)
            if step in bad and rank == 1:
                grads[bad[step]][0, 0, 0, 0] = torch.nan
            before = state.state_dict()["states"]
            model.zero_grad()
            model(grads).backward()
            after = state.state_dict()["states"]
            flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            same = before.keys() == after.keys()
            changed = {
                name.partition("/")[0] for name in after if not (same and torch.equal(before[name], after[name]))
            }
            outcomes.append({"finite": bool(flat.isfinite().all()), "changed": sorted(changed)})
    return outcomes


def agree(tensor: torch.Tensor, group: dist.ProcessGroup) -> bool:
    """Whether all ranks hold the same bits."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return all(torch.equal(tensor.view(torch.int32), other.view(torch.int32)) for other in everyone)
