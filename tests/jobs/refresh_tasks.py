"""Training whose plan is chosen anew, on real ranks: against lockstep, and stopped and resumed at any moment."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradlab.codec import Tensors
from gradlab.executor.lockstep_plan import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import Plan
from gradlab.plan.refresh import Accordion, Refresh
from gradlab.runtime import CompressionState, compression_hook
from support.contract import SPARE
from support.prescribed import Prescribed, gradients

SHAPES = {"conv": (16, 8, 3, 3), "wide": (24, 150), "tall": (200, 18), "vector": (65,)}
EVERY, DELAY, FIRST, STEPS = 4, 2, 1, 14  # chosen after 4, 8 and 12, adopted before 7, 11 and (not reached) 15
GRIDS: dict[str, list[dict[str, Any]]] = {
    "powersgd": [{"rank": rank} for rank in range(1, 7)],
    "topk": [{"density": density} for density in (0.01, 0.03, 0.1, 0.3)],
    "qsgd": [{"bits": bits} for bits in (2, 3, 4, 6, 8)],
}
REFERENCE = {"powersgd": 2, "topk": 2, "qsgd": 2}


def plan_of(codec: str, alpha: float = 1.0, delay: int = DELAY, accordion: bool = False) -> Plan:
    """A uniform plan with error feedback, chosen anew from a grid around it; or from its ends, as Accordion says."""
    reference = GRIDS[codec][REFERENCE[codec]]
    layers = layers_of(Prescribed(SHAPES))
    plan = Plan.uniform(layers, codec, error_feedback=codec != "qsgd", warmup_steps=FIRST, seed=3, **reference)
    names = [group.name for group in plan.compressed_groups]
    refresh = Refresh(EVERY, dict.fromkeys(names, GRIDS[codec]), dict.fromkeys(names, REFERENCE[codec]), delay, alpha)
    if accordion:
        least, most = dict.fromkeys(names, len(GRIDS[codec]) - 1), dict.fromkeys(names, 0)
        refresh = replace(refresh, accordion=Accordion(least, most))
    return replace(plan, refresh=refresh)


def drawn(rank: int, step: int) -> Tensors:
    """Gradients of which another layer is the largest after every choice."""
    grads = gradients(SHAPES, rank, step)
    loud = list(SHAPES)[(step - FIRST) // EVERY % 3]
    return {name: grad * (20.0 if name == loud else 1.0) for name, grad in grads.items()}


def rate_at(step: int) -> float:
    """A learning rate that falls by half in the third window."""
    return 0.1 if step < FIRST + 2 * EVERY else 0.05


def with_rate(model: DistributedDataParallel) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def set_rate(optimizer: torch.optim.SGD, step: int) -> None:
    for parameters in optimizer.param_groups:
        parameters["lr"] = rate_at(step)


def against_lockstep(group: dist.ProcessGroup, codec: str, accordion: bool = False) -> dict[str, Any]:
    """Bit for bit in deterministic mode: gradients, states, bytes, the settings in use, and critical regimes."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    plan = plan_of(codec, accordion=accordion)
    lockstep = LockstepPlan(plan, world_size, plain_sgd=True)
    model = DistributedDataParallel(Prescribed(SHAPES), process_group=group, bucket_cap_mb=0.01)
    optimizer = with_rate(model)
    same, used, critical = True, [], []
    with CompressionState(
        plan,
        model,
        optimizer=optimizer,
        deterministic=True,
        check_requests=True,
        process_group=SPARE.get(world_size),
    ) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            set_rate(optimizer, step)
            model(drawn(rank, step)).backward()
            optimizer.step()
            rates = dict.fromkeys(SHAPES, rate_at(step))
            result = lockstep.step(step, [drawn(r, step) for r in range(world_size)], rates)
            for ranks in result.exchanged.values():
                same = same and all(
                    torch.equal(getattr(model.module, name).grad, mean) for name, mean in ranks[rank].mean.items()
                )
            same = same and state.statistics.steps[-1].payload_bytes == result.payload[rank]
            same = same and state.run.plan.digest == lockstep.plan.digest
            used.append([str(group.settings) for group in state.run.plan.compressed_groups])
            critical.append(state.report()["refresh"]["critical"])
        kept = state.run.states
        same_states = all(
            torch.equal(kept[name][key], value)
            for name, held in lockstep.states[rank].items()
            for key, value in held.items()
        )
        report = state.report()["refresh"]
    return {"same": same, "same_states": same_states, "used": used, "report": report, "critical": critical}


def resumed(group: dist.ProcessGroup, codec: str, stop: int, accordion: bool = False) -> dict[str, Any]:
    """One run at once, another stopped after `stop` iterations and continued from its checkpoint."""
    rank, spare = dist.get_rank(group), SPARE.get(dist.get_world_size(group))

    def fresh() -> tuple[CompressionState, DistributedDataParallel, torch.optim.SGD]:
        model = DistributedDataParallel(Prescribed(SHAPES), process_group=group, bucket_cap_mb=0.01)
        optimizer, plan = with_rate(model), plan_of(codec, accordion=accordion)
        state = CompressionState(plan, model, optimizer=optimizer, deterministic=True, process_group=spare)
        model.register_comm_hook(state, compression_hook)
        return state, model, optimizer

    def steps(model: DistributedDataParallel, optimizer: torch.optim.SGD, span: range) -> list[torch.Tensor]:
        seen = []
        for step in span:
            model.zero_grad()
            set_rate(optimizer, step)
            model(drawn(rank, step)).backward()
            optimizer.step()
            seen.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]))
        return seen

    state, model, optimizer = fresh()
    with state:
        straight = steps(model, optimizer, range(STEPS))
        last, seen = state.run.plan.digest, state.report()["refresh"]
    state, model, optimizer = fresh()
    with state:
        steps(model, optimizer, range(stop))
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
    file.seek(0)
    state, model, optimizer = fresh()
    with state:
        state.load_state_dict(torch.load(file, weights_only=True))
        continued = steps(model, optimizer, range(stop, STEPS))
        same_plan = state.run.plan.digest == last and state.report()["refresh"] == seen
    return {"equal": all(map(torch.equal, straight[stop:], continued)), "same_plan": same_plan}


def failing(group: dist.ProcessGroup) -> dict[str, Any]:
    """A choice that cannot be made, as no plan meets the budget: training goes on as it was."""
    rank = dist.get_rank(group)
    plan = plan_of("powersgd", alpha=1e-9)
    model = DistributedDataParallel(Prescribed(SHAPES), process_group=group)
    with CompressionState(plan, model, process_group=SPARE.get(dist.get_world_size(group))) as state:
        model.register_comm_hook(state, compression_hook)
        for step in range(STEPS):
            model.zero_grad()
            model(drawn(rank, step)).backward()
        return {"stayed": state.run.plan.digest == plan.digest, "report": state.report()["refresh"]}
