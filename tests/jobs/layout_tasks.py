"""Tasks of ranks whose parameters get another memory, layout or object after something was attached to them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.plan import Plan, Wrap
from gradlab.runtime import CompressionState, Exchange, OuterStep, compression_hook
from gradlab.trace import Trace
from support.contract import lockstep
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients

SHAPES = {"conv": (16, 8, 3, 3), "wide": (12, 300)}
STEPS = 4


def _lay_out(bare: nn.Module) -> None:
    """Let the convolution lie channels_last and the matrix by columns."""
    bare.conv.data = bare.conv.data.to(memory_format=torch.channels_last)
    bare.wide.data = bare.wide.data.t().contiguous().t()


def _train(bare: Prescribed, model: DistributedDataParallel, when: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """Take some steps; what DDP leaves in each as gradients."""
    found = []
    for step in range(STEPS):
        if when == f"before step {step}":
            _lay_out(bare)
        if when == f"back before step {step}":
            bare.wide.data = bare.wide.data.contiguous()
        model.zero_grad()
        model(gradients(SHAPES, rank, step)).backward()
        found.append({name: one.grad.detach().clone() for name, one in bare.named_parameters() if one.grad is not None})
    return found


def _wrapped(group: dist.ProcessGroup, when: str, **options: Any) -> tuple[Prescribed, DistributedDataParallel]:
    bare = Prescribed(SHAPES)
    if when == "before DDP" or when.startswith("back"):
        _lay_out(bare)
    return bare, DistributedDataParallel(bare, process_group=group, **options)


def layouts_under_ddp(group: dist.ProcessGroup, when: str, folder: str, **options: Any) -> dict[str, Any]:
    """Whether a codec and a recording see each gradient in its parameter's shape, or what they say instead."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    results: dict[str, Any] = {}
    bare, model = _wrapped(group, when, **options)
    plan = Plan.uniform(model, "powersgd", rank=2, seed=3)
    history = lockstep(plan, world_size, STEPS, lambda r, t: gradients(SHAPES, r, t))
    try:
        with CompressionState(plan, model, deterministic=True, process_group=SPARE.get(world_size)) as state:
            model.register_comm_hook(state, compression_hook)
            found = _train(bare, model, when, rank)
        wanted = [{name: step[name][rank].value.mean[name] for name in SHAPES} for step in history]
        results["compressed"] = all(
            torch.equal(one[name], other[name]) for one, other in zip(found, wanted, strict=True) for name in SHAPES
        )
    except (GradlabError, RuntimeError) as error:
        results["compressed"] = str(error)
    bare, model = _wrapped(group, when, **options)
    with TraceRecorder(model, Path(folder) / "trace") as recorder:
        _train(bare, model, when, rank)
    dist.barrier(group)
    with Trace(Path(folder) / "trace", allow_empty=True) as trace:
        wanted = [gradients(SHAPES, rank, step) for step in trace.steps.tolist()]
        results["recorded"] = all(
            np.array_equal(trace.read(name, rank)[at].reshape(SHAPES[name]), own[name].numpy())
            for at, own in enumerate(wanted)
            for name in SHAPES
        )
        results["steps"] = len(wanted)
    results["lost"] = recorder.steps_lost
    return results


def convolution_that_turns(group: dist.ProcessGroup, folder: str, formats: tuple[str, str]) -> dict[str, Any]:
    """What a codec and a recording make of a convolution that has another memory format from step 3 on."""

    def wrapped() -> tuple[nn.Module, DistributedDataParallel]:
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
        net.to(memory_format=getattr(torch, formats[0]))
        return net, DistributedDataParallel(net, process_group=group, gradient_as_bucket_view=True)

    def train(net: nn.Module, model: DistributedDataParallel) -> None:
        for step in range(6):
            if step == 3:
                net.to(memory_format=getattr(torch, formats[1]))
            model.zero_grad()
            model(torch.randn(8, 3, 4, 4)).square().mean().backward()

    net, model = wrapped()
    spare, said = SPARE.get(dist.get_world_size(group)), ""
    try:
        with CompressionState(Plan.uniform(model, "topk", minimum_numel=1), model, process_group=spare) as state:
            model.register_comm_hook(state, compression_hook)
            train(net, model)
    except (GradlabError, RuntimeError) as error:
        said = str(error)
    net, model = wrapped()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with TraceRecorder(model, Path(folder) / "trace") as recorder:
            train(net, model)
    told = [str(one.message) for one in caught if "memory layout" in str(one.message)]
    dist.barrier(group)
    with Trace(Path(folder) / "trace") as trace:
        return {"compressed": said, "steps": len(trace.steps), "lost": recorder.steps_lost, "told": len(told)}


def _clipped(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clamp(-0.05, 0.05)


def _frozen(net: nn.Sequential) -> None:
    net[3].requires_grad_(False)


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "nothing": lambda net: None,
    "channels_last": lambda net: net.to(memory_format=torch.channels_last),
    "double": lambda net: net.double(),
    "clipped": _clipped,
    "frozen": _frozen,
    "weight_norm": lambda net: nn.utils.parametrizations.weight_norm(net[3]),
    "assigned": lambda net: net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}, assign=True),
    "replaced": lambda net: net.__setitem__(3, nn.Linear(128, 4)),
    "unfrozen": lambda net: net[0].requires_grad_(True),
    "added": lambda net: net.append(nn.Linear(4, 4)),
}


def outer_step_after(group: dist.ProcessGroup, change: str, delay: int) -> float | str:
    """How far workers are apart after outer steps, where the model changed after the outer step was made."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(rank)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
        if change == "unfrozen":
            net[0].requires_grad_(False)
        plan = Plan.uniform(net, "block_scaled", dtype="int4", minimum_numel=1)
        try:
            with OuterStep(plan, net, every=3, delay=delay, mixing=0.0, group=group) as outer:
                CHANGES[change](net)
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
                for _ in range(6 + delay):
                    inputs = torch.randn(4, 3, 4, 4, generator=generator).to(next(net.parameters()).dtype)
                    optimizer.zero_grad()
                    net(inputs).square().mean().backward()
                    optimizer.step()
                    if change == "clipped":
                        _clipped(net)
                    outer.step()
        except GradlabError as error:
            return str(error)
    own = torch.cat([parameter.detach().double().reshape(-1) for parameter in net.parameters()])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    return float(max((one - own).abs().max() for one in every))


def other_dtype_under_ddp(group: dist.ProcessGroup, folder: str) -> dict[str, str]:
    """What a state and a recorder say of a model that gets another dtype after DDP was made: DDP's hook goes."""
    plan, said = Plan.uniform(nn.Linear(4, 2), "topk", minimum_numel=1), {}

    def compressed(model: DistributedDataParallel) -> CompressionState:
        state = CompressionState(plan, model, process_group=SPARE.get(dist.get_world_size(group)))
        model.register_comm_hook(state, compression_hook)
        return state

    def recorded(model: DistributedDataParallel) -> TraceRecorder:
        return TraceRecorder(model, Path(folder) / when)

    for way, when in itertools.product((compressed, recorded), ("before", "after")):
        model = DistributedDataParallel(nn.Linear(4, 2), process_group=group)
        if when == "before":
            model.double()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with way(model):
                    model(torch.ones(1, 4)).sum().backward()
                    model.double()
            except GradlabError as error:
                warnings.warn(str(error), stacklevel=1)
        said[f"{way.__name__} {when}"] = " ".join(str(one.message) for one in caught)
    return said


def decays_by_present_values(group: dist.ProcessGroup) -> bool:
    """Whether weight decay reads a parameter's values where they are now, after they got another memory."""
    model = nn.Linear(8, 4, bias=False)
    plan = Plan.uniform(model, "identity", minimum_numel=1, wrappers=[Wrap("weight_decay", {"rate": 0.5})])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = Exchange(plan, model.named_parameters(), group, optimizer=optimizer)
    right = []
    for step in range(3):
        model.weight.data = torch.full((4, 8), float(step + 1))
        gradient = torch.zeros(4, 8)
        exchange.step({"weight": gradient})
        right.append(torch.equal(gradient, torch.full((4, 8), 0.5 * (step + 1))))
    exchange.close()
    return all(right)
