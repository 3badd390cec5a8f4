"""Tasks for real ranks: dist-EF-blockSGDM and what it is compared with, under DDP."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec import Tensors
from gradlab.errors import GradlabError
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.recipes import METHODS
from gradlab.runtime import CompressionState, compression_hook
from jobs.ddp_tasks import SMALL_BUCKETS
from support.image_network import image_network
from support.pool_groups import SPARE
from support.prescribed import Prescribed, gradients

SHAPES = {"conv": (16, 8, 3, 3), "bias": (16,), "wide": (12, 300), "scalar": (), "norm": (5,)}
# Warm-up from zero, changes, a pause, and a rate that comes back.
SHARES = [1.0, 0.3, 0.5]  # of the rate, by parameter group
RATES = [0.0, 0.02, 0.05, 0.05, 0.1, 0.0, 0.0, 0.02, 0.04, 0.01, 0.01, 0.06]


def engine_equals_lockstep(group: dist.ProcessGroup, method: str, server: str) -> dict[str, Any]:
    """A method under DDP, rates changing, against its plan in lockstep: gradients and states, bit for bit."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    model = DistributedDataParallel(Prescribed(SHAPES), process_group=group, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = method_plan(model, method, server=server, group_bytes=9000)
    received: list[Any] = [None]
    dist.scatter_object_list(received, _in_lockstep(plan, world_size) if rank == 0 else None, src=0, group=group)
    expected_means, expected = received[0]
    means, bitwise = hashlib.sha256(), True
    with CompressionState(
        plan,
        model,
        optimizer=optimizer,
        deterministic=True,
        check_requests=True,
        process_group=SPARE.get(world_size),
    ) as state:
        model.register_comm_hook(state, compression_hook)
        for step, rate in enumerate(RATES):
            optimizer.param_groups[0]["lr"] = rate
            model.zero_grad()
            model(gradients(SHAPES, rank, step)).backward()
            for name, mean in expected_means[step].items():
                got = getattr(model.module, name).grad
                bitwise = bitwise and torch.equal(got, mean)
                means.update(got.numpy().tobytes())
            optimizer.step()
        kept = state.state_dict()["states"]
    same = kept.keys() == expected.keys() and all(torch.equal(kept[key], expected[key]) for key in kept)
    return {"bitwise": bitwise, "states": same, "means": means.hexdigest(), "groups": len(plan.compressed_groups)}


def _in_lockstep(plan: Plan, world_size: int) -> list[tuple[list[Tensors], Tensors]]:
    """By rank: the means of each step, and the states after the last."""
    reference = LockstepPlan(plan, world_size, plain_sgd=True)
    means: list[list[Tensors]] = [[] for _ in range(world_size)]
    for step, rate in enumerate(RATES):
        drawn = [gradients(SHAPES, rank, step) for rank in range(world_size)]
        result = reference.step(step, drawn, dict.fromkeys(SHAPES, rate))
        for rank, steps in enumerate(means):
            steps.append({n: mean for ranks in result.exchanged.values() for n, mean in ranks[rank].mean.items()})
    states = [
        {f"{group}::{key}": value for group, held in own.items() for key, value in held.items()}
        for own in reference.states
    ]
    return list(zip(means, states, strict=True))


def lemma(group: dist.ProcessGroup, method: str, server: str) -> dict[str, float]:
    """How far the error-corrected iterate is from its recurrence in a real run, and how far the residuals are from it.

    Lemma 1 and, with momentum, Lemma 3; in float64, so that only roundings remain. The last layers join the optimizer
    in the fifth iteration.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    bare = image_network().double()
    model = DistributedDataParallel(bare, process_group=group, bucket_cap_mb=SMALL_BUCKETS)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[:3]}, {"params": parameters[3:-4]}], lr=0.1)
    mu = 0.9 if METHODS[method].momentum else 0.0
    local: Tensors = {}
    names = dict(zip(parameters, (layer.name for layer in layers_of(bare)), strict=True))
    stream = torch.Generator().manual_seed(100 + rank)
    momentum: Tensors = {}
    largest = owed_most = 0.0
    joined = {names[p] for p in parameters[:-4]}
    with CompressionState(
        method_plan(model, method, server=server), model, optimizer=optimizer, process_group=SPARE.get(world_size)
    ) as state:

        def watching(state, bucket):  # type: ignore[no-untyped-def]
            local.update({names[p]: g.clone() for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)})
            return compression_hook(state, bucket)

        model.register_comm_hook(state, watching)
        corrected = {names[p]: p.detach().clone() for p in parameters}
        last = dict.fromkeys(corrected, 0.0)
        for step, rate in enumerate(RATES):
            if step == 4:
                optimizer.add_param_group({"params": parameters[-4:]})
                joined = set(corrected)  # they owe nothing: what no optimizer applies leaves no residual
            for settings, share in zip(optimizer.param_groups, SHARES, strict=False):
                settings["lr"] = share * rate
            rates = {names[p]: settings["lr"] for settings in optimizer.param_groups for p in settings["params"]}
            images = torch.randn(8, 1, 8, 8, generator=stream, dtype=torch.float64)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.randint(10, (8,), generator=stream)).backward()
            optimizer.step()
            momentum = {n: mu * momentum[n] + g if n in momentum else g.clone() for n, g in local.items()}
            sent = {name: mu * momentum[name] + g if mu else g for name, g in local.items()}
            owed = residuals(state, group)
            for parameter, name in names.items():
                mean = sent[name].clone()
                dist.all_reduce(mean, group=group)
                if name in joined:
                    corrected[name] -= rates[name] * mean / world_size
                    last[name] = rates[name] or last[name]
                    debt = last[name] * owed.get(name, torch.zeros_like(mean))  # none before the first rate
                    away = parameter.detach() - debt - corrected[name]
                    largest, owed_most = max(largest, float(away.abs().max())), max(owed_most, float(debt.abs().max()))
    return {"largest": largest, "owed": owed_most}


def residuals(state: CompressionState, group: dist.ProcessGroup) -> Tensors:
    """e~ + mean e_i of every layer, on every rank."""
    ours = {key.partition("::")[2]: value for key, value in state.state_dict()["states"].items()}
    everyone: list[Tensors] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, ours, group=group)
    owed = {}
    for key, value in ours.items():
        name, _, what = key.rpartition("/")
        if what == "residual":
            own = torch.stack([theirs[key] for theirs in everyone]).mean(0)
            server = torch.cat([theirs[f"{name}/server_residual"] for theirs in everyone])
            owed[name] = own + server.view(value.shape)
    return owed


def weight_decay_is_torchs(group: dist.ProcessGroup, form: str) -> float:
    """SGDM with weight decay in the plan, against torch's optimizer with both under plain DDP: largest difference."""
    parameters = []
    for ours in (True, False):
        model = DistributedDataParallel(image_network().double(), process_group=group, bucket_cap_mb=SMALL_BUCKETS)
        own: dict[str, Any] = {} if ours else {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **own)
        state = None
        if ours:
            plan = method_plan(model, "SGDM", weight_decay=0.05, weight_decay_form=form)
            state = CompressionState(
                plan, model, optimizer=optimizer, process_group=SPARE.get(dist.get_world_size(group))
            )
            model.register_comm_hook(state, compression_hook)
        stream = torch.Generator().manual_seed(100 + dist.get_rank(group))
        for _ in range(10):
            images = torch.randn(8, 1, 8, 8, generator=stream, dtype=torch.float64)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), torch.randint(10, (8,), generator=stream)).backward()
            optimizer.step()
        parameters.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        if state is not None:
            state.close()
    return float((parameters[0] - parameters[1]).abs().max())


def refusals(group: dist.ProcessGroup) -> dict[str, str]:
    """What a state says of an optimizer that does what the plan does, or that it needs and is not given."""
    model = DistributedDataParallel(image_network(), process_group=group)
    sgd, adam, messages = torch.optim.SGD, torch.optim.AdamW, {}
    block, decayed = "dist-EF-blockSGDM", {"weight_decay": 1e-4}
    attempts: dict[str, tuple[Plan, Any]] = {
        "own momentum": (method_plan(model, block), sgd(model.parameters(), lr=0.1, momentum=0.9)),
        "adam": (method_plan(model, block), adam(model.parameters(), lr=0.1)),
        "own weight decay": (
            method_plan(model, "signSGD", weight_decay=1e-4),
            sgd(model.parameters(), lr=0.1, **decayed),
        ),
        "no optimizer": (method_plan(model, "dist-EF-blockSGD"), None),
        "no optimizer, momentum": (method_plan(model, "signum"), None),
        "no optimizer, weight decay": (method_plan(model, "signSGD", weight_decay=1e-4), None),
        "adam, feedback by default": (Plan.uniform(model, "sign"), adam(model.parameters(), lr=0.1)),
        "adam, residuals follow": (method_plan(model, "dist-EF-blockSGD"), adam(model.parameters(), lr=0.1)),
        "plain": (Plan.uniform(model, "sign"), sgd(model.parameters(), lr=0.1)),
        "nothing kept": (Plan.uniform(model, "qsgd"), sgd(model.parameters(), lr=0.1)),
        "ratio asked of momentum": (
            Plan.uniform(model, "sign", wrappers=[Wrap("error_feedback", {"step_size_ratio": True})]),
            sgd(model.parameters(), lr=0.1, momentum=0.9),
        ),
    }
    for name, (plan, optimizer) in attempts.items():
        try:
            spare = SPARE.get(dist.get_world_size(group))
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                state = CompressionState(plan, model, optimizer=optimizer, process_group=spare)
            messages[name] = f"{state.report()['residuals']} ({len(warned)} warnings)"
            state.close()
        except GradlabError as error:
            messages[name] = str(error)
    return messages
