"""Tasks for real ranks under FSDP2: nodes that shard a model inside and exchange shards between them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor import Shard as TensorShard
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gradlab.artifact import Artifact
from gradlab.codec import Context, Training, exchange_group
from gradlab.codecs.identity import Identity
from gradlab.collectives import mean_of_node, run_lockstep
from gradlab.ddp.groups import part_of
from gradlab.ddp.optimizers import all_optimizers
from gradlab.ddp.sharded_units import sharded_modules
from gradlab.executor import LockstepPlan
from gradlab.executor.reduce_scatter import reduce_scatter_group
from gradlab.layout import layers_of, names_of_parameters
from gradlab.plan import FEEDBACK, Group, Plan, Wrap, state_bytes
from gradlab.plan.refresh import Refresh
from gradlab.runtime import FSDPCompression, compress_fsdp
from gradlab.runtime.checkpoint import sealed
from jobs.node_tasks import grouped_plan
from support.contract import SETTINGS, held_bytes, learned
from support.two_optimizers import muon_and_adamw


class Block(nn.Module):
    """A residual block, whose second matrix has rows that do not divide evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.tanh(self.up(values)))


class Network(nn.Module):
    """An embedding, blocks, one of which a step may leave out, and a head."""

    def __init__(self, width: int = 21, words: int = 30) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, words)

    def forward(self, words: torch.Tensor, blocks: int = 3, head: bool = True) -> torch.Tensor:
        values = self.embedding(words)
        for block in self.blocks[:blocks]:
            values = block(values)
        return self.head(values) if head else values


@functools.cache
def mesh_of(group: dist.ProcessGroup, nodes: int) -> DeviceMesh:
    """A mesh of so many nodes over the ranks of a group."""
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(nodes, -1)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def sharded(
    mesh: DeviceMesh,
    change: Callable[[nn.Module], nn.Module] = lambda module: module,
    divide: float | None = None,
    together: bool = False,
    ends: int | None = None,
    **options: Any,
) -> Any:
    """The model with each block a unit, and the rest one.

    divide: the number that the sum of gradients is divided by. together: embedding and head are a unit. ends: the head
    is one, with so many of the last blocks. With `dp_mesh_dims` all parameters are on the whole mesh, and batches too.
    """
    torch.manual_seed(0)
    model = Network()
    if "dp_mesh_dims" in options:
        placed = [TensorShard(0)] * mesh.ndim
        distribute_module(
            model,
            mesh,
            input_fn=lambda _, given, on: (DTensor.from_local(given[0], on, placed),),
            output_fn=lambda _, scores, on: scores.to_local(),
        )
    for position, block in enumerate(model.blocks[: 3 - (ends or 0)]):
        model.blocks[position] = fully_shard(change(block), mesh=mesh, **options)
    if together:
        fully_shard([model.embedding, model.head], mesh=mesh, **options)
    if ends is not None:
        fully_shard([*model.blocks[3 - ends :], model.head], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for _, module in sharded_modules(model) if divide else ():
        module.set_gradient_divide_factor(divide)
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no other way
    return model


def plan_of(model: nn.Module, codec: str, settings: dict[str, Any]) -> Plan:
    """Every matrix in a group of its own; of two blocks the first matrices are one group. "identity": nothing.

    "artifact": the plan of the file at `path`. "several": groups take one of SEVERAL[settings["of"]] each, in turn.
    Of a list in place of a setting the groups take one value each, in turn, as in a plan by layer.
    """
    layers = layers_of(model)
    if codec == "identity":
        return Plan(layers)
    if codec == "artifact":
        return Artifact.load(settings["path"]).plan
    settings = dict(settings)
    joined = tuple(settings.pop("joined", ("blocks.0.up.weight", "blocks.1.up.weight")))
    names = [layer.name for layer in layers if len(layer.shape) > 1 and layer.name not in joined]
    members = {"joined": joined, **{name: (name,) for name in names}}
    if codec == "several":
        kinds = itertools.cycle(SEVERAL[settings["of"]])
        groups = [Group(name, of, one, own, wraps) for (name, of), (one, own, wraps) in zip(members.items(), kinds)]  # noqa: B905
        return Plan(layers, tuple(groups))
    return grouped_plan(layers, members, codec, settings)


# Codecs of the groups of one model: between nodes, and in a reduce-scatter.
SEVERAL: dict[str, list[tuple[str, dict[str, Any], tuple[Wrap, ...]]]] = {
    "between": [
        ("powersgd", {"rank": 2}, FEEDBACK),
        ("topk", {"density": 0.05}, FEEDBACK),
        ("block_scaled", {"dtype": "int8"}, FEEDBACK),
        ("sign", {}, FEEDBACK),
    ],
    "inside": [
        ("block_scaled", {"dtype": "int8"}, FEEDBACK),
        ("topk", {"density": 0.1}, FEEDBACK),
        ("block_scaled", {"dtype": "int4"}, (*FEEDBACK, Wrap("hadamard", {"block": 64}))),
        ("qsgd", {"bits": 4}, FEEDBACK),
    ],
    "speaking": [
        ("topk", {"density": 0.01}, ()),
        ("qsgd", {"bits": 2, "norm": "l2"}, (Wrap("error_feedback", {"contraction": "none"}),)),
    ],
}


def words_of(rank: int, step: int) -> torch.Tensor:
    """A rank's batch."""
    return torch.randint(30, (5, 4), generator=torch.Generator().manual_seed(1000 * step + rank))


def backward(model: Any, rank: int, step: int, **forward: Any) -> None:
    """One pass."""
    words = words_of(rank, step)
    scores = model(words, **forward).float()
    nn.functional.cross_entropy(scores.flatten(0, 1), words.roll(1, 1).flatten()).backward()


def in_pieces(model: Any, rank: int, step: int) -> None:
    """One pass whose loss is taken in pieces from what the model returns, as torchtitan's chunked loss is: the head has
    a backward pass for each, and is reduced in the last one, before the others' pass."""
    words, gradients = words_of(rank, step), []
    values = model(words, head=False)
    for number, (piece, targets) in enumerate(zip(values.detach(), words.roll(1, 1), strict=True)):
        model.head.set_requires_gradient_sync(number == len(words) - 1)
        given = piece.detach().requires_grad_()
        (nn.functional.cross_entropy(model.head(given).float(), targets) / len(words)).backward()
        gradients.append(given.grad)
    values.backward(torch.stack(gradients))


def local_gradients(model: Any) -> dict[str, torch.Tensor]:
    """A rank's shards of the gradients."""
    names = names_of_parameters(model)
    named = ((names[id(parameter)], parameter.grad) for parameter in model.parameters())
    return {name: gradient.to_local().clone() for name, gradient in named if gradient is not None}


def farthest(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of an element, over the largest element."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name], theirs[name]) for name in ours if ours[name].numel()]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs), default=0.0)


def adamw(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(parameters, lr=1e-2, foreach=True)]


# Ways to train in which nothing is compressed: arguments of fully_shard, of the plan, and passes per optimizer step.
UNCOMPRESSED: dict[str, dict[str, Any]] = {
    "default": {},
    "16 bits": {"shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}},
    "16 bits, reduced in 32": {"shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}},
    "every pass reduced, gradients summed": {"passes": 2},
    "Muon": {"optimizers": muon_and_adamw},
    "taken over": {"over": True},
    "taken over, nodes averaged with the last micro-batch": {
        "over": True,
        "passes": 3,
        "shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    },
    "taken over, as torchtitan shards and sums": {
        "over": True,
        "shard": {
            "divide": 1.0,
            "together": True,
            "dp_mesh_dims": DataParallelMeshDims(shard="shard", replicate="replicate"),
        },
    },
    "taken over, gathered anew in other groups": {"over": True, "shard": {"reshard_after_forward": 1}},
    "every pass reduced in 32 bits, gradients summed": {
        "shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "passes": 2,
    },
    "dense steps, 16 bits": {
        "shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
        "warmup_steps": 1000,
    },
    "parameters gathered as they are": {"over": True, "parameters": True},
    "a loss in pieces": {"shard": {"ends": 0}, "backward": in_pieces},
    "taken over, a loss in pieces by a part of a unit": {
        "over": True,
        "parameters": True,
        "shard": {"ends": 1},
        "backward": in_pieces,
    },
}


def against_native(group: dist.ProcessGroup, nodes: int, steps: int, option: str = "default") -> dict[str, Any]:
    """Training with nothing compressed, and native HSDP's: parameters, bit for bit.

    On a mesh of two dimensions Muon sums bfloat16 over both. Beside it nodes' gradients are therefore averaged by hand.
    Options with "over" compress a model that is under native HSDP itself, and put nodes' averages off.
    """
    rank, chosen = dist.get_rank(group), UNCOMPRESSED[option]
    mesh, by_hand = mesh_of(group, nodes), "optimizers" in chosen
    native = sharded(mesh["shard"] if by_hand else mesh, **chosen.get("shard", {}))
    over = chosen.get("over", False)
    ours = sharded(mesh if over else mesh["shard"], **chosen.get("shard", {}))
    make = chosen.get("optimizers", adamw)
    optimizers = [make(model.parameters()) for model in (native, ours)]
    plan, warmup = plan_of(ours, "identity", {}), chosen.get("warmup_steps", 0)
    if warmup:
        plan = Plan.uniform(layers_of(ours), "topk", density=0.1, warmup_steps=warmup)
    same, passes = True, chosen.get("passes", 1)
    between = None if over else mesh["replicate"]
    parameters = Plan(layers_of(ours)) if "parameters" in chosen else None
    with compress_fsdp(ours, plan, between=between, optimizer=optimizers[1], parameters=parameters) as state:
        for step in range(steps):
            for model, optimizer in zip((native, ours), optimizers, strict=True):
                model.zero_grad()
                for part in range(passes):
                    model.set_requires_all_reduce(part == passes - 1 or not over)
                    chosen.get("backward", backward)(model, rank, passes * step + part)
                if by_hand and model is native:
                    for parameter in model.parameters():
                        dist.all_reduce(local := parameter.grad.to_local(), group=mesh["replicate"].get_group())
                        local /= nodes
                for one in optimizer:
                    one.step()
            pairs = zip(native.parameters(), ours.parameters(), strict=True)
            same = same and all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
        last, report = state.statistics.steps[-1], state.report()
    return {"same": same, "counted": last.payload_bytes, "forecast": report["forecast_payload_bytes"]}


def compressed(
    group: dist.ProcessGroup, nodes: int, codec: str, settings: dict[str, Any], option: str = "default"
) -> dict[str, Any]:
    """Six steps: bytes counted and forecast, what ranks of a column agree on, and how loss falls."""
    rank = dist.get_rank(group)
    mesh = mesh_of(group, nodes)
    model = sharded(mesh["shard"], **OPTIONS[option].get("shard", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    state = compress_fsdp(model, plan_of(model, codec, settings), between=mesh["replicate"], optimizer=optimizer)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    report, kept = state.report(), held_bytes(state.run.states.values())
    counted = state_bytes(state.run.plan, nodes, mesh["replicate"].get_local_rank())
    state.close()
    everyone: list[Any] = [None] * group.size()
    shards = {name: value.to_local().tolist() for name, value in model.named_parameters()}
    dist.all_gather_object(everyone, shards, group=group)
    width = group.size() // nodes
    return {
        "counted": state.statistics.steps[-1].payload_bytes,
        "forecast": report["forecast_payload_bytes"],
        "agree": all(everyone[rank] == everyone[rank % width + width * node] for node in range(nodes)),
        "nodes": report["nodes"],
        "kept": kept == counted,
        "finite": all(bool(torch.tensor(list(_flat(shard))).isfinite().all()) for shard in shards.values()),
        "refused": _refusal(lambda: backward(model, rank, 7)),
    }


def _flat(value: Any) -> Any:
    if isinstance(value, list):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _refusal(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return str(error)
    return ""


def _gradients_of_nodes(model: Any, column: dist.ProcessGroup) -> list[dict[str, torch.Tensor]]:
    """What the ranks of a column exchange: every node's shards of the gradients, in the order of nodes."""
    everyone: list[Any] = [None] * column.size()
    dist.all_gather_object(everyone, local_gradients(model), group=column)
    return everyone


# What an FSDP run may do beside: arguments of fully_shard, of a step, and what happens to the model.
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "reshard_after_forward=False": {"shard": {"reshard_after_forward": False}},
    "16 bits": {"shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}},
    "16 bits, reduced in 32": {"shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}},
    "accumulation": {"micro_batches": 3},
    "checkpointing": {"change": checkpoint_wrapper},
    "compiled": {"change": lambda block: torch.compile(block, backend="aot_eager")},
    "prefetching": {"prefetch": True},
    "a block left out": {"blocks": lambda step: 2 if step in (2, 3) else 3},
    "frozen on the way": {"frozen_from": 3},
    "frozen before": {"frozen_from": 0},
    "overflow": {"overflow_at": 2},
    "all together": {
        "shard": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "micro_batches": 2,
        "overflow_at": 2,
        "frozen_from": 3,
    },
}


def against_lockstep(
    group: dist.ProcessGroup, nodes: int, codec: str, settings: dict[str, Any], option: str
) -> dict[str, Any]:
    """Gradients and states of every step, and those that lockstep makes of the nodes' shards; bit for bit."""
    chosen, rank = OPTIONS[option], dist.get_rank(group)
    mesh = mesh_of(group, nodes)
    column, node = mesh["replicate"].get_group(), mesh["replicate"].get_local_rank()
    travels = getattr(chosen.get("shard", {}).get("mp_policy"), "reduce_dtype", torch.float32)
    options, change = chosen.get("shard", {}), chosen.get("change", lambda module: module)
    plain, ours = (sharded(mesh["shard"], change, **options) for _ in range(2))
    if chosen.get("prefetch"):
        ours.blocks[0].set_modules_to_forward_prefetch([ours.blocks[1]])
        ours.blocks[2].set_modules_to_backward_prefetch([ours.blocks[1]])
    if chosen.get("frozen_from") == 0:
        for model in (plain, ours):
            model.blocks[1].down.weight.requires_grad_(False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, ours)]
    plan = plan_of(ours, codec, settings)
    same, same_states, finite = [], [], []
    with compress_fsdp(
        ours, plan, between=mesh["replicate"], optimizer=optimizers[1], deterministic=True, measure_every=2
    ) as state:
        reference = LockstepPlan(state.run.plan, nodes, plain_sgd=True)
        for step in range(5):
            if step == chosen.get("frozen_from"):
                for model in (plain, ours):
                    model.blocks[1].down.weight.requires_grad_(False)
            for model in (plain, ours):
                model.zero_grad()
                _passes(model, rank, step, chosen)
            by_node = [{n: g.to(travels) for n, g in grads.items()} for grads in _gradients_of_nodes(plain, column)]
            expected = _expected(reference, state.run.plan, by_node, step)
            given = local_gradients(ours)
            finite.append(all(bool(value.isfinite().all()) for value in given.values()))
            wanted = {name: expected[name].to(travels).to(value.dtype) for name, value in given.items()}
            same.append(all(torch.equal(given[name], wanted[name]) for name in given) or not finite[-1])
            same_states.append(_same_states(state, reference, node))
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                for parameter in model.parameters():
                    if parameter.grad is not None and finite[-1]:
                        parameter.grad.to_local().copy_(given[names_of_parameters(model)[id(parameter)]])
                if finite[-1]:
                    optimizer.step()
    return {"same": same, "states": same_states, "finite": finite}


def _passes(model: Any, rank: int, step: int, chosen: dict[str, Any]) -> None:
    micro_batches = chosen.get("micro_batches", 1)
    blocks = chosen.get("blocks", lambda _: 3)(step)
    for part in range(micro_batches):
        model.set_requires_gradient_sync(part == micro_batches - 1)
        words = words_of(rank, 10 * step + part)
        loss = nn.functional.cross_entropy(model(words, blocks).flatten(0, 1).float(), words.roll(1, 1).flatten())
        (loss * torch.inf if step == chosen.get("overflow_at") and rank == 1 else loss).backward()


def _expected(
    reference: LockstepPlan, plan: Plan, by_node: list[dict[str, torch.Tensor]], step: int
) -> dict[str, torch.Tensor]:
    """What every node should apply; layers without a gradient on any rank keep their states."""
    shapes = {layer.name: layer.shape for layer in plan.layers}
    absent = sorted(shapes.keys() - by_node[0].keys())
    before = [{name: dict(kept) for name, kept in rank.items()} for rank in reference.states]
    whole = [{name: grads.get(name, torch.zeros(shapes[name])) for name in shapes} for grads in by_node]
    done = reference.step(step, whole, dict.fromkeys(shapes, 0.1))
    for rank, run in enumerate(reference.runs):
        for group in plan.compressed_groups:
            if group.name in run.states and all(name in absent for name in group.layers):
                run.states[group.name] = before[rank].get(group.name, {})
            for name in set(absent) & set(group.layers) if done.finite else ():
                kept = {k: v for k, v in before[rank].get(group.name, {}).items() if k.startswith(f"{name}/")}
                new = {k: v for k, v in run.states.get(group.name, {}).items() if not k.startswith(f"{name}/")}
                run.states[group.name] = new | kept
    means = {name: mean for ranks in done.exchanged.values() for name, mean in ranks[0].mean.items()}
    for name in by_node[0].keys() - means.keys():
        tensors = [grads[name] for grads in by_node]
        lone = [exchange_group(Identity(), {name: one}, {}, Context(0, len(tensors), step)) for one in tensors]
        means[name] = run_lockstep(lone)[0].value.mean[name]
    return means


def _same_states(state: FSDPCompression, reference: LockstepPlan, node: int) -> bool:
    theirs, ours = reference.runs[node].states, state.run.states
    return all(
        torch.equal(ours[group][key], value) for group, kept in theirs.items() for key, value in kept.items()
    ) and sum(map(len, ours.values())) == sum(map(len, theirs.values()))


def resumed(group: dist.ProcessGroup, nodes: int, folder: str, levels: int = 1) -> dict[str, Any]:
    """A run that goes on from a checkpoint of torch.distributed.checkpoint, and the one that went on."""
    rank, mesh = dist.get_rank(group), mesh_of(group, nodes)
    models = [sharded(mesh["shard"]) for _ in range(2)]
    optimizers = [muon_and_adamw(model.parameters()) for model in models]
    plan = plan_of(models[0], "topk", {"density": 0.1})
    inner = plan_of(models[0], "block_scaled", {"dtype": "int8"})
    second = {"within": mesh["shard"], "inside": inner} if levels > 1 else {}
    states = [
        compress_fsdp(model, plan, between=mesh["replicate"], optimizer=optimizer, deterministic=True, **second)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]

    def all_of(which: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(models[which], optimizers[which])
        return {"model": model, "optimizer": optimizer, "gradlab": states[which].stateful}

    for step in range(2):
        _train(models[0], optimizers[0], rank, step)
    dcp.save(all_of(0), checkpoint_id=folder, process_group=group)
    restored = all_of(1)
    dcp.load(restored, checkpoint_id=folder, process_group=group)
    set_state_dict(models[1], optimizers[1], model_state_dict=restored["model"], optim_state_dict=restored["optimizer"])
    same = []
    for step in range(2, 4):
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, rank, step)
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        same.append(all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs))
    iterations = [state.iteration for state in states]
    for state in states:
        state.close()
    return {"same": same, "iterations": iterations}


def _train(model: Any, optimizer: Any, rank: int, step: int) -> None:
    model.zero_grad()
    backward(model, rank, step)
    for one in all_optimizers(optimizer):
        one.step()


def fewer_nodes(group: dist.ProcessGroup) -> dict[str, Any]:
    """Four nodes become two of as many shards, by two policies: what was due between nodes."""
    rank = dist.get_rank(group)
    mesh = mesh_of(group, 4)
    model = sharded(mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = plan_of(model, "topk", {"density": 0.1})
    state = compress_fsdp(model, plan, between=mesh["replicate"], optimizer=optimizer)
    for step in range(3):
        _train(model, optimizer, rank, step)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, state.state_dict(), group=group)
    state.close()
    row, first = rank % 2, rank // 2 * 2
    column = part_of((group,), [first, first + 1], None, torch.device("cpu"))  # two runs of two nodes, side by side
    other = sharded(mesh["shard"])
    again = compress_fsdp(other, plan_of(other, "topk", {"density": 0.1}), between=column, optimizer=None)
    refusal = _refusal(lambda: again.load_state_dict(everyone[row]))
    before = sum(one["states"]["head.weight::head.weight/residual"].double() for one in everyone)
    due = [float(before.norm()) / 4]
    for policy in ("split", "sum"):
        again.load_state_dicts(everyone, policy)
        kept = again.run.states["head.weight"]["head.weight/residual"].double().clone()
        dist.all_reduce(kept, group=column)
        due.append(float(kept.norm()) / 2)
    other.zero_grad()
    backward(other, row, 3)
    iteration = again.iteration
    again.close()
    return {"due": due, "iteration": iteration, "refusal": refusal}


def fewer_nodes_inside(group: dist.ProcessGroup, nodes: int) -> dict[str, Any]:
    """A run of compressed reduce-scatters goes on with half as many nodes: what was due of every shard, and then is, by
    policy.

    There are ranks for the new run alone. The checkpoints of the old one's nodes come from two runs, one after the
    other.
    """
    rank, halves = dist.get_rank(group), 2
    mesh = mesh_of(group, nodes)
    width = group.size() // nodes
    everyone: list[dict[str, Any]] = []
    for half in range(halves):
        state, model = _in_two_levels(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            _train(model, optimizer, rank + half * group.size(), step)
        saved: list[Any] = [None] * group.size()
        dist.all_gather_object(saved, state.state_dict(), group=group)
        state.close()
        everyone += [_moved_to(one, half * nodes, nodes * halves, width) for one in saved]
    again, model = _in_two_levels(mesh)
    messages, due = _refusals_of_states(again, everyone), {"before": _due_inside(everyone, width)}
    for policy in ("drop", "sum", "split"):
        again.load_state_dicts(everyone, policy)
        kept: list[Any] = [None] * group.size()
        dist.all_gather_object(kept, again.state_dict(), group=group)
        due[policy] = _due_inside(kept, width)
    backward(model, rank, 3)
    iterations = [again.iteration, *(run.iteration for run in again.inside.runs)] if again.inside else []
    again.close()
    return {"due": due, "iterations": iterations, "refusals": messages}


def _in_two_levels(mesh: DeviceMesh) -> tuple[FSDPCompression, Any]:
    model = sharded(mesh["shard"])
    plan, inner = plan_of(model, "topk", {"density": 0.1}), plan_of(model, "block_scaled", {"dtype": "int8"})
    return compress_fsdp(model, plan, between=mesh["replicate"], within=mesh["shard"], inside=inner), model


def _moved_to(saved: dict[str, Any], first: int, nodes: int, width: int) -> dict[str, Any]:
    """A rank's checkpoint, as it is in a run of more nodes, whose node 0 is `first` there."""
    place = {"rank": saved["rank"] + first * width, "node": saved["node"] + first, "world_size": nodes * width}
    return sealed({**saved, **place})


def _due_inside(states: list[dict[str, Any]], width: int) -> list[float]:
    """By local rank and shard of a node: the norm of all layers' residuals' means over nodes."""
    norms = []
    for local_rank in range(width):
        for shard in range(width):
            parts = [one["inside"]["parts"][shard]["states"] for one in states if one["local_rank"] == local_rank]
            means = [sum(part[key].double() for part in parts) / len(parts) for key in parts[0]]
            norms.append(float(sum(mean.square().sum() for mean in means)) ** 0.5)
    return norms


def _refusals_of_states(state: FSDPCompression, everyone: list[dict[str, Any]]) -> dict[str, str]:
    """What is said of checkpoints that do not fit. None of them may have changed the state."""

    def spoiled(change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        copies = [{**one, "inside": {**one["inside"], "parts": list(one["inside"]["parts"])}} for one in everyone]
        for one in copies:
            change(one)
        return copies

    def without_a_state(one: dict[str, Any]) -> None:
        if one["node"] == 1:
            first, *others = one["inside"]["parts"]
            fewer = sealed({**first, "states": dict(list(first["states"].items())[1:])})
            one["inside"]["parts"] = [fewer, *others]

    def of_another_step(one: dict[str, Any]) -> None:
        one["inside"]["parts"] = [sealed({**part, "iteration": 2 + one["node"]}) for part in one["inside"]["parts"]]

    def with_a_changed_bit(one: dict[str, Any]) -> None:
        first, *others = one["inside"]["parts"]
        name, residual = next(iter(first["states"].items()))
        changed = residual.clone()
        changed.view(-1)[0] += 1
        one["inside"]["parts"] = [{**first, "states": {**first["states"], name: changed}}, *others]

    attempts: dict[str, Any] = {
        "a changed bit": spoiled(with_a_changed_bit),
        "fewer shards": spoiled(lambda one: one["inside"]["parts"].pop()),
        "no state": spoiled(lambda one: one["inside"].update(parts=[None, None])),
        "no parts": spoiled(lambda one: one["inside"].pop("parts")),
        "another plan": spoiled(lambda one: one["inside"].update(plan="other")),
        "one level": spoiled(lambda one: one.pop("inside")),
        "a state is missing": spoiled(without_a_state),
        "several steps": spoiled(of_another_step),
        "a node is missing": [one for one in everyone if one["node"] != 1],
        "no list": 3,
    }
    messages = {
        name: _refusal(lambda saved=saved: state.load_state_dicts(saved, "split")) for name, saved in attempts.items()
    }
    messages["a policy"] = _refusal(lambda: state.load_state_dicts(everyone, "mean"))
    messages["alone"] = _refusal(lambda: state.load_state_dict(everyone[dist.get_rank()]))
    assert state.iteration == 0
    assert not state.run.states
    return messages


def _reentrant(model: Network, words: torch.Tensor) -> torch.Tensor:
    values = model.embedding(words)
    for block in model.blocks:
        values = torch_checkpoint(block, values, use_reentrant=True)
    return model.head(values)


def changed(group: dist.ProcessGroup, nodes: int) -> dict[str, str]:
    """What is said of a model that was changed after compression was attached, in its next backward pass or two."""
    rank, mesh = dist.get_rank(group), mesh_of(group, nodes)
    shard = mesh["shard"]

    def unfreeze(model: Any) -> None:
        model.blocks[1].requires_grad_(True)

    def unfreeze_part(model: Any) -> None:
        model.blocks[1].up.requires_grad_(True)

    def put_off(model: Any) -> None:
        model.blocks[1].set_requires_all_reduce(False)

    def assign(model: Any) -> None:
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def override(model: Any) -> None:
        model.blocks[1].set_all_reduce_hook(lambda _: None)

    def add(model: Any) -> None:
        model.extra = fully_shard(nn.Linear(3, 3), mesh=shard)

    def reenter(model: Any) -> None:
        model.forward = partial(_reentrant, model)

    messages = {}
    for change in (unfreeze, unfreeze_part, put_off, assign, override, add, reenter):
        model = sharded(shard)
        if change is unfreeze:
            model.blocks[1].requires_grad_(False)
        if change is unfreeze_part:
            model.blocks[1].up.requires_grad_(False)
        plan = Plan.uniform(layers_of(model), "topk", density=0.1)
        with compress_fsdp(model, plan, between=mesh["replicate"]):
            backward(model, rank, 0)
            change(model)
            messages[change.__name__] = _refusal(partial(backward, model, rank, 1))
        dist.barrier(group)
    return messages


def with_weight_decay(group: dist.ProcessGroup, nodes: int) -> list[float]:
    """By whether FSDP is forced to sum, and what it divides by: how far weight decay is from native HSDP's."""
    ways = ((False, None), (True, None), (True, 1.0))
    return [_with_weight_decay(group, nodes, forced, divide) for forced, divide in ways]


def _with_weight_decay(group: dist.ProcessGroup, nodes: int, forced: bool, divide: float | None) -> float:
    """The farthest that weight decay in the plan comes from native HSDP's in the optimizer, where FSDP divides late."""
    rank, mesh, rate = dist.get_rank(group), mesh_of(group, nodes), 0.1
    native, ours = sharded(mesh, divide=divide), sharded(mesh["shard"], divide=divide)
    for model in (native, ours):
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(forced)
    plan = Plan.uniform(layers_of(ours), "topk", density=1.0, wrappers=[Wrap("weight_decay", {"rate": rate})])
    decayed = {name for one in plan.groups for name in one.layers}
    parts: tuple[list[Any], list[Any]] = ([], [])
    for name, value in native.named_parameters():
        parts[name not in decayed].append(value)
    settings = ({"params": parts[0], "weight_decay": rate}, {"params": parts[1]})
    optimizers = [torch.optim.SGD(settings, lr=0.5), torch.optim.SGD(ours.parameters(), lr=0.5)]
    with compress_fsdp(ours, plan, between=mesh["replicate"], optimizer=optimizers[1]):
        for step in range(2):
            for model, optimizer in zip((native, ours), optimizers, strict=True):
                optimizer.zero_grad()
                backward(model, rank, step)
                optimizer.step()
    values = [{name: value.to_local() for name, value in model.named_parameters()} for model in (ours, native)]
    return farthest(*values)


class _OwnReduceScatter:
    """Somebody else's, set before."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, **_: Any) -> None:
        dist.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of models and meshes that do not fit."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    shard, replicate = mesh["shard"], mesh["replicate"]
    fits = sharded(shard)
    plan = plan_of(fits, "topk", {"density": 0.1})
    messages = {}

    def attempt(name: str, model: Any, plan: Any = plan, between: Any = replicate, **options: Any) -> None:
        messages[name] = _refusal(lambda: compress_fsdp(model, plan, between=between, **options).close())

    attempt("native HSDP, other ranks", sharded(mesh), between=shard)
    mixed = Network()
    fully_shard(mixed.blocks[0], mesh=mesh)
    attempt("native HSDP in part", fully_shard(mixed, mesh=shard))
    attempt("no FSDP", Network())
    attempt("no model", 3)
    attempt("the whole mesh", fits, between=mesh)
    attempt("a number", fits, between=2)
    attempt("neither", fits, between=None)
    attempt("no plan inside", fits, within=shard)
    attempt("a plan inside alone", fits, inside=plan)
    attempt("within other ranks", fits, within=replicate, inside=plan)
    attempt("means on its way", fits, within=shard, inside=plan_of(fits, "powersgd", {"rank": 2}))
    wrapped = Plan(plan.layers, (Group("a", ("head.weight",), "topk", {}, (Wrap("two_way"),)),))
    attempt("a wrapper", fits, within=shard, inside=wrapped)
    attempt("the shards' mesh", fits, between=shard)
    attempt("columns that cross", fits, between=mesh_of(group, 1)["shard"])
    attempt("one node", fits, between=mesh_of(group, 4)["shard"])
    other = Network(width=23)
    attempt("other shapes", fully_shard(other, mesh=shard))
    renamed = tuple(replace(layer, name=f"old.{layer.name}") for layer in plan.layers)
    attempt("other names", fits, plan=Plan.uniform(renamed, "topk", density=0.1))
    attempt("no plan", fits, plan=None)
    attempt("ranks disagree", fits, segment_bytes=1000 + rank)
    attempt("an option", fits, measure_every=-1)
    settings = {"head.weight": [{"density": 0.1}, {"density": 0.2}]}
    attempt("refresh", fits, plan=replace(plan, refresh=Refresh(4, settings, {"head.weight": 0})))
    partly = Network()
    fully_shard(partly.blocks[0], mesh=shard)
    attempt("a part", partly)
    rootless = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for part in rootless:
        fully_shard(part, mesh=shard)
    attempt("parts alone", rootless)
    several = Network()
    for block, one in zip(several.blocks, (shard, shard, replicate), strict=True):
        fully_shard(block, mesh=one)
    attempt("several meshes", fully_shard(several, mesh=shard))
    attempt("offloaded", sharded(shard, offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with torch.device("meta"):
        attempt("not made", sharded(shard))
    hooked = sharded(shard)
    hooked.blocks[1].set_all_reduce_hook(lambda _: None)
    attempt("a hook already", hooked)
    reducing = sharded(shard)
    reducing.blocks[1].set_custom_reduce_scatter(_OwnReduceScatter())
    inner = plan_of(fits, "block_scaled", {"dtype": "int8"})
    attempt("a reduce-scatter already", reducing, within=shard, inside=inner)
    messages["fits"] = _refusal(lambda: compress_fsdp(fits, plan, between=replicate).close())
    attempt("attached twice", fits)
    matrix = next(layer for layer in plan.layers if layer.name == "blocks.0.up.weight")
    groups = (Group("fitted", (matrix.name,), "gradiveq", SETTINGS["gradiveq"]),)
    kept = {"fitted": learned("gradiveq", (matrix,))}
    attempt("learned", sharded(shard), plan=Plan(plan.layers, groups, learned=kept))
    return messages


def unused(group: dist.ProcessGroup) -> dict[str, str]:
    """A parameter without a gradient in a unit whose others have one."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    messages = {}
    for name, told in (("not said", False), ("said", True)):
        model = sharded(mesh["shard"])
        model.set_reduce_scatter_unused_params(told)
        with compress_fsdp(model, plan_of(model, "topk", {"density": 0.1}), between=mesh["replicate"]):
            messages[name] = _refusal(lambda model=model: model(words_of(rank, 0), 0, False).sum().backward())
    model = sharded(mesh["shard"], ends=1)
    joined = Group("joined", ("blocks.2.up.weight", "head.weight"), "topk", {"density": 0.1})
    with compress_fsdp(model, Plan(layers_of(model), (joined,)), between=mesh["replicate"]):
        messages["a group in pieces"] = _refusal(lambda: in_pieces(model, rank, 0))
    model = sharded(mesh["shard"])
    plan = plan_of(model, "topk", {"density": 0.1, "joined": ["blocks.1.up.weight", "blocks.1.down.weight"]})
    both = {"between": mesh["replicate"], "within": mesh["shard"], "inside": plan}
    with compress_fsdp(model, Plan(layers_of(model)), **both):  # type: ignore[arg-type]
        model.blocks[1].down.weight.requires_grad_(False)
        messages["frozen inside"] = _refusal(lambda: backward(model, rank, 0))
    return messages


def steps_of_passes(group: dist.ProcessGroup) -> dict[str, list[tuple[int, int]]]:
    """The iteration after each batch's backward pass, and after its optimizer step, where the head is called alone."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)

    def head_and_body_apart(model: Any, step: int) -> None:
        values = model(words_of(rank, step), head=False)
        (model.head(values.detach()) if step % 2 else values).square().mean().backward()

    def head_behind(model: Any, step: int) -> None:
        model.head(model(words_of(rank, step), blocks=2, head=False)).square().mean().backward()

    def batches_skipped(model: Any, step: int) -> None:
        if step % 2:
            model.head(model(words_of(rank, step), head=False).detach()).square().mean().backward()
            model.zero_grad()
        in_pieces(model, rank, step)

    found = {}
    for way in (partial(in_pieces, rank=rank), head_and_body_apart, head_behind, batches_skipped):
        model = sharded(mesh, ends=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counted = []
        with compress_fsdp(model, plan_of(model, "topk", {"density": 0.1}), optimizer=optimizer) as state:
            for step in range(4):
                way(model, step=step)
                before = state.iteration
                optimizer.step()
                counted.append((before, state.iteration))
        found[getattr(way, "__name__", "in_pieces")] = counted
    return found


def reduced(
    group: dist.ProcessGroup,
    nodes: int,
    codec: str,
    settings: dict[str, Any],
    between: str = "",
    divide: float | None = None,
) -> dict[str, Any]:
    """A compressed reduce-scatter, and perhaps an exchange between nodes behind it, as lockstep has them.

    divide: the number that FSDP divides the sum of all ranks by, in place of the mean.
    """
    rank, mesh = dist.get_rank(group), mesh_of(group, nodes)
    ours = sharded(mesh["shard"], divide=divide)
    for _, module in sharded_modules(ours):
        module.set_force_sum_reduction_for_comms(False)  # it then asks for NCCL's division, which a plan takes over
    times = (group.size() if between else mesh["shard"].size()) / divide if divide else 1
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    plan = plan_of(ours, codec, settings)
    if codec == "ecsq":  # it fits tables to each part of a group, which takes long
        plan = replace(plan, groups=tuple(one for one in plan.groups if one.name in ("joined", "head.weight")))
    options: dict[str, Any] = {"deterministic": True, "optimizer": optimizer, "within": mesh["shard"]}
    if between:
        second = plan_of(ours, between, {"density": 0.1})
        state = compress_fsdp(ours, second, between=mesh["replicate"], inside=plan, **options)
    else:
        state = compress_fsdp(ours, plan, **options)
    assert state.inside is not None
    reference = _Reductions(state.inside.plan, group.size(), nodes)
    outer = LockstepPlan(state.run.plan, nodes, plain_sgd=True)
    same = []
    for step in range(3):
        whole = Network()
        values = {name: parameter.full_tensor() for name, parameter in ours.named_parameters()}
        whole.load_state_dict(values)
        backward(whole, rank, step)
        everyone: list[Any] = [None] * group.size()
        dist.all_gather_object(everyone, {n: p.grad for n, p in whole.named_parameters()}, group=group)
        ours.zero_grad()
        backward(ours, rank, step)
        given = local_gradients(ours)
        by_rank = [{name: times * one for name, one in of_rank.items()} for of_rank in reference.step(step, everyone)]
        rows = {name: value.shape[0] for name, value in given.items()}
        padded = by_rank[rank % reference.width :: reference.width] if between else [by_rank[rank]]
        column = [{name: part[name][: rows[name]] for name in rows} for part in padded]
        expected = _expected(outer, state.run.plan, column, step) if between else column[0]
        same.append(all(torch.equal(given[name], expected[name]) for name in given))
        optimizer.step()
    said = state.report()["inside"]
    state.close()
    return {"same": same, "counted": said["payload_bytes"], "forecast": said["forecast_payload_bytes"]}


def rules_inside(group: dist.ProcessGroup, between: bool) -> dict[str, Any]:
    """A finding of a rule in the reduce-scatter, as an error; with a plan between nodes, or without."""
    rank, mesh = dist.get_rank(group), mesh_of(group, 2)
    model = sharded(mesh["shard"])
    plans = [plan_of(model, "several", {"of": "speaking"}), plan_of(model, "block_scaled", {"dtype": "int8"})]
    options = {"rules": {"residual_grows": "error"}, "measure_every": 2, "inside": plans[0]}
    outer = plans[1] if between else replace(plans[1], groups=())
    with compress_fsdp(model, outer, between=mesh["replicate"], within=mesh["shard"], **options) as state:
        error = _refusal(partial(_backward_often, model, rank))
        found = [[one["rule"], one["group"]] for one in state.report()["rules"]]
    return {"error": error, "found": found}


def _backward_often(model: Any, rank: int) -> None:
    for step in range(14):
        backward(model, rank, step)


class _Reductions:
    """The reduce-scatters of all nodes, in this process."""

    def __init__(self, plan: Plan, ranks: int, nodes: int) -> None:
        self.plan, self.width = plan, ranks // nodes
        self.codecs = {one.name: plan.build(one) for one in plan.groups}
        self.states: dict[tuple[int, str, int], Any] = {}  # by rank, group and part

    def step(self, step: int, gradients: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """The padded means of every rank's part."""
        shapes = {layer.name: layer.shape for layer in self.plan.layers}
        grouped = {name for group in self.plan.groups for name in group.layers}
        results: list[dict[str, torch.Tensor]] = [{} for _ in gradients]
        for first in range(0, len(gradients), self.width):
            ranks = range(first, first + self.width)
            parts = {rank: [_part(gradients[rank], shapes, place) for place in range(self.width)] for rank in ranks}
            for group in self.plan.groups:
                coroutines = [self._of_rank(group, parts[rank], rank, rank - first, step) for rank in ranks]
                for rank, done in zip(ranks, run_lockstep(coroutines), strict=True):
                    for place, one in enumerate(done.value):
                        self.states[rank, group.name, place] = one.state
                    results[rank] |= done.value[rank - first].mean
            for rank in ranks:
                for name in shapes.keys() - grouped:
                    results[rank][name] = mean_of_node([parts[other][rank - first][name] for other in ranks])
        return results

    def _of_rank(self, group: Group, parts: list[dict[str, torch.Tensor]], rank: int, mine: int, step: int) -> Any:
        plain = Training(plain_sgd=True)
        contexts = [
            Context(mine, self.width if place == mine else 1, step, group=f"{group.name} to {place}", training=plain)
            for place in range(self.width)
        ]
        own = [{name: part[name] for name in group.layers} for part in parts]
        states = [self.states.get((rank, group.name, place), {}) for place in range(self.width)]
        return reduce_scatter_group(self.codecs[group.name], own, states, contexts, mine)


def _part(gradients: dict[str, torch.Tensor], shapes: dict[str, Any], place: int) -> dict[str, torch.Tensor]:
    """One rank's rows of every layer, padded with zeros."""
    parts = {}
    for name, shape in shapes.items():
        rows = gradients[name][place * shape[0] : (place + 1) * shape[0]]
        parts[name] = torch.zeros(shape)
        parts[name][: len(rows)] = rows
    return parts
