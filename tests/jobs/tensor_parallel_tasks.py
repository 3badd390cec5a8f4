"""Tasks of ranks whose layers tensor parallelism cuts before FSDP2 shards them: 2 nodes x shards x 2 parts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gradlab import codecs
from gradlab.capture import TraceRecorder
from gradlab.codec import hash_tensor, seeded_generator
from gradlab.codec.abilities import decompress
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.runtime import FSDPCompression, compress_fsdp


def mesh_of(group: dist.ProcessGroup) -> DeviceMesh:
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(2, -1, 2)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard", "part"))


def whole() -> nn.Sequential:
    """Two blocks of two matrices each."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2)))


def cut(mesh: DeviceMesh, words: int = 0) -> Any:
    """Blocks, whose first matrix is cut by rows and the second by columns, under native HSDP. words: between an
    embedding of so many and a head."""
    blocks = whole()
    model = nn.Sequential(nn.Embedding(words, 16), *blocks, nn.Linear(16, words)) if words else blocks
    for block in blocks:
        parallelize_module(block, mesh["part"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(block, mesh=mesh["replicate", "shard"])
    return fully_shard(model, mesh=mesh["replicate", "shard"])


def backward(model: Any, rank: int, step: int) -> float:
    """One pass; ranks that hold parts of the same layers have the same batch."""
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank // 2))
    loss = (model(inputs) - inputs.flip(1)).square().mean()
    loss.backward()
    return float(loss.detach())


def own(model: Any) -> list[torch.Tensor]:
    return [parameter.to_local() for parameter in model.parameters()]


def trained(group: dist.ProcessGroup) -> dict[str, Any]:
    """Nothing compressed beside native HSDP, then codecs: losses, bytes, and what ranks of the same part agree on."""
    mesh, rank = mesh_of(group), dist.get_rank(group)
    models = [cut(mesh), cut(mesh)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    with compress_fsdp(models[1], Plan(layers_of(models[1])), optimizer=optimizers[1]):
        for step in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model.zero_grad()
                if step:
                    model.set_requires_all_reduce(False)
                    backward(model, rank, 2)  # a micro-batch before the one after which nodes meet
                    model.set_requires_all_reduce(True)
                backward(model, rank, step)
                optimizer.step()
    found: dict[str, Any] = {"same": all(map(torch.equal, own(models[0]), own(models[1])))}
    for codec, how in (("powersgd", {"rank": 2}), ("ecsq", {"bits": 2.0})):
        model = cut(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with compress_fsdp(model, Plan.uniform(model, codec, **how), optimizer=optimizer) as state:  # type: ignore[arg-type]
            losses = []
            for _ in range(4):
                model.zero_grad()
                losses.append(backward(model, rank, 0))
                optimizer.step()
        replicas = [torch.stack([one.double().sum() for one in own(model)]) for _ in range(2)]
        dist.all_gather(replicas, replicas[0].clone(), group=mesh["replicate"].get_group())
        varying = codec == "ecsq"
        counted = state.statistics.steps[-1].payload_bytes
        found[codec] = {
            "falls": losses[-1] < losses[0],
            "agree": torch.equal(*replicas),
            "as forecast": varying or counted == state.report()["forecast_payload_bytes"],
        }
    return found


def skipped(group: dist.ProcessGroup) -> dict[str, Any]:
    """One part's gradient overflows in the first of two micro-batches: no part takes the step. A run that goes on from
    its state is the one that did."""
    mesh, rank = mesh_of(group), dist.get_rank(group)
    models = [cut(mesh), cut(mesh)]
    plan = Plan.uniform(models[0], "topk", density=0.2, warmup_steps=0)
    states = [compress_fsdp(model, plan, rules={"non_finite": "warn"}) for model in models]
    backward(models[0], rank, 0)
    kept = _hashes(states[0])
    models[0].zero_grad()
    hooks = []
    if rank == group.size() // 2 - 1:
        # The first layer's of node 0, its last shard, part 1: nothing passes it on to another part.
        first = models[0][0][0]
        hooks += [first.register_forward_hook(lambda *given: given[-1].register_hook(torch.Tensor.log) and None)]
    models[0].set_requires_all_reduce(False)
    backward(models[0], rank, 1)
    for hook in hooks:
        hook.remove()
    models[0].set_requires_all_reduce(True)
    backward(models[0], rank, 2)
    bad = [bool(parameter.grad.to_local().isnan().any()) for parameter in models[0].parameters()]
    finite, unchanged = states[0].statistics.steps[-1].finite, _hashes(states[0]) == kept
    saved = states[0].stateful.state_dict()
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, [next(iter(saved)), states[0].state_dict()], group=group)
    refusal = ""
    try:
        states[1].load_state_dict(everyone[rank ^ 1][1])
    except GradlabError as error:
        refusal = str(error)
    states[1].stateful.load_state_dict(saved)
    same = _hashes(states[1]) == kept
    states[1].load_state_dicts([state for _, state in everyone], "sum")
    report, driver = states[0].report(), states[0]._driver
    for state in states:
        state.close()
    return {
        "part": (report["part"], report["parts"]),
        "called": (states[0].chrome_trace()[0]["args"]["name"], driver.everyone.names),
        "found": [one.ranks for one in states[0].findings],
        "finite": finite,
        "all filled": all(bad),
        "unchanged": unchanged,
        "entries": len({name for name, _ in everyone}),
        "refusal": refusal,
        "resumed": [same, _hashes(states[1]) == kept],
    }


def _hashes(state: FSDPCompression) -> list[str]:
    states = state.run.states
    return [hash_tensor(one) for group in sorted(states) for _, one in sorted(states[group].items())]


def quantized(group: dist.ProcessGroup) -> dict[str, bool]:
    """Parameters gathered in int8: a pass computes with what each shard of this rank's part decodes to, evaluation with
    the parameters as they are, and training ends alike on all ranks of a part."""
    mesh, rank = mesh_of(group), dist.get_rank(group)
    model = cut(mesh)
    first = model[0][0]
    exact, used = first.weight.to_local().clone(), list[torch.Tensor]()
    first.register_forward_hook(lambda module, *_: used.append(module.weight.to_local().clone()))
    plan = Plan.uniform(layers_of(model), "block_scaled", exchanges="parameters", minimum_numel=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with compress_fsdp(model, Plan(layers_of(model)), parameters=plan, optimizer=optimizer) as state:
        for step in range(3):
            model.zero_grad()
            backward(model, rank, step)
            optimizer.step()
        report = state.report()["parameters"]
        shards = [one.detach().clone() for one in _gathered(first.weight.to_local(), mesh)]
        with torch.no_grad():
            model.eval()(torch.ones(2, 16))
    codec = codecs.make("block_scaled")
    start = torch.cat(
        [
            decompress(codec, codec.compress(one.reshape(-1), seeded_generator("none")), one.reshape(-1))
            for one in _gathered(exact, mesh)
        ]
    )
    replicas = [torch.stack([one.double().sum() for one in own(model)]) for _ in range(2)]
    dist.all_gather(replicas, replicas[0].clone(), group=mesh["replicate"].get_group())
    return {
        "decoded": torch.equal(used[0].reshape(-1), start),
        "evaluated": torch.equal(used[-1], torch.cat(shards)),
        "agree": torch.equal(*replicas),
        "as forecast": report["payload_bytes"] == report["forecast_payload_bytes"],
    }


def _gathered(own_shard: torch.Tensor, mesh: DeviceMesh) -> list[torch.Tensor]:
    """The shards of this rank's part that the ranks of its node hold."""
    shards = [torch.empty_like(own_shard) for _ in range(mesh["shard"].size())]
    dist.all_gather(shards, own_shard.detach().contiguous(), group=mesh["shard"].get_group())
    return shards


def recorded(group: dist.ProcessGroup, folder: str) -> bool:
    """Train a while as it is, and recorded; return whether both end alike, bit for bit."""
    mesh, rank = mesh_of(group), dist.get_rank(group)
    ended = []
    for recording in (False, True):
        model = cut(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with TraceRecorder(model, folder, optimizer=optimizer) if recording else nullcontext():
            for step in range(3):
                model.zero_grad()
                backward(model, rank, step)
                optimizer.step()
        ended.append(own(model))
    dist.barrier(group)
    return all(map(torch.equal, *ended))


def refused(group: dist.ProcessGroup, folder: str) -> str:
    """The refusal to record an embedding whose words are cut into unequal parts."""
    mesh = mesh_of(group)
    model = nn.Sequential(nn.Embedding(25, 16))
    parallelize_module(model, mesh["part"], {"0": RowwiseParallel(input_layouts=Replicate())})
    fully_shard(model, mesh=mesh["replicate", "shard"])
    try:
        TraceRecorder(model, folder)
    except GradlabError as error:
        return str(error)
    return "nothing"
