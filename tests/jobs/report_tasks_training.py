"""Tasks for real ranks: loops of public reports, by plain DDP, recorded and compressed."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradlab
from gradlab.capture import TraceRecorder
from gradlab.errors import GradlabError
from gradlab.plan import Plan, Wrap
from gradlab.trace import Trace
from support.pool_groups import SPARE

STEPS = 4
Inputs = Callable[[], torch.Tensor]
Step = Callable[[Any, torch.optim.Optimizer, Inputs], None]


def network(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), *between, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


class Parts(nn.Module):
    """Uses one of its parts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor, part: int) -> torch.Tensor:
        return self.head(self.parts[part](inputs))  # type: ignore[no-any-return]


class Tied(nn.Module):
    """An embedding that is the head too, and a layer used twice, under checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.inner = nn.Embedding(40, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.table((inputs.abs() * 10).long() % 40).mean(1)
        for layer in (self.inner, self.inner, self.head):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        return hidden


class OfNumbers(nn.Module):
    """A layer of complex numbers beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.real = nn.Linear(16, 32)
        self.turn = nn.Parameter(torch.randn(32, 8, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(self.real(inputs).to(torch.complex64) @ self.turn)


def loss(model: Any, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
    return model(inputs, *more).square().mean()  # type: ignore[no-any-return]


# --- one optimizer step ----------------------------------------------------------------------------------------------


def plain(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    loss(model, inputs()).backward()
    optimizer.step()


def first_of_two_synchronised(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    loss(model, inputs()).backward()
    with model.no_sync():
        loss(model, inputs()).backward()
    optimizer.step()


def retained(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    outputs = model(inputs())
    outputs.square().mean().backward(retain_graph=True)
    outputs.mean().backward()
    optimizer.step()


def penalised(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    seen = inputs().requires_grad_(True)
    (slope,) = torch.autograd.grad(loss(model, seen), seen, create_graph=True)
    (slope.square().sum() + loss(model, inputs())).backward()
    optimizer.step()


def inside(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    plain(model.module, optimizer, inputs)


def sharpness(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    """Sharpness-aware: a step uphill, and the gradient there for the step from where it began."""
    seen, parameters = inputs(), list(model.parameters())
    optimizer.zero_grad()
    loss(model, seen).backward()
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.05 * nn.functional.normalize(parameter.grad.flatten(), dim=0).view_as(parameter))
    optimizer.zero_grad()
    loss(model, seen).backward()
    with torch.no_grad():
        for parameter, before in zip(parameters, kept, strict=True):
            parameter.copy_(before)
    optimizer.step()


def other_part_last(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    """What the first pass alone uses differs between ranks."""
    optimizer.zero_grad()
    with model.no_sync():
        loss(model, inputs(), dist.get_rank()).backward()
    loss(model, inputs(), 2).backward()
    optimizer.step()


def two_forwards(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad()
    (loss(model, inputs()) - model(inputs()).mean()).backward()
    optimizer.step()


def zeroed_by_turns(model: Any, optimizer: torch.optim.Optimizer, inputs: Inputs) -> None:
    optimizer.zero_grad(set_to_none=next(_TURNS) % 2 == 0)
    loss(model, inputs()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()


_TURNS = itertools.count()
LOOPS: dict[str, tuple[Callable[[], nn.Module], Step, dict[str, Any]]] = {
    "first of two synchronised": (network, first_of_two_synchronised, {}),
    "retained": (network, retained, {}),
    "penalised": (network, penalised, {}),
    "penalised, static graph": (network, penalised, {"static_graph": True}),
    "inside": (network, inside, {}),
    "sharpness": (network, sharpness, {}),
    "other part last": (Parts, other_part_last, {"find_unused_parameters": True}),
    "tied, checkpointed": (Tied, plain, {"static_graph": True}),
    "two forwards": (lambda: network(nn.BatchNorm1d(32)), two_forwards, {}),
    "zeroed by turns": (network, zeroed_by_turns, {"gradient_as_bucket_view": True}),
    "complex": (OfNumbers, plain, {}),
}


def trained(group: dist.ProcessGroup, loop: str, attach: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Parameters after some steps, how far they are from rank 0's, what was said, and what was attached."""
    make, step, options = LOOPS[loop]
    model = DistributedDataParallel(make(), process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(7 + dist.get_rank(group))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attached = attach(model, optimizer)
        for _ in range(STEPS):
            step(model, optimizer, lambda: torch.randn(8, 16, generator=draw))
        rules = [one.rule for one in getattr(attached, "findings", ())]
        if attached is not None:
            attached.close()
    parts = [p.detach() for p in model.parameters()]
    own = torch.cat([(torch.view_as_real(p) if p.is_complex() else p).reshape(-1) for p in parts])
    first = own.clone()
    dist.broadcast(first, 0, group=group)
    said = " ".join(str(one.message) for one in caught if "gradlab" in str(one.message))
    return {"own": own, "drift": float((own - first).abs().max()), "said": said, "rules": rules, "state": attached}


def looped(
    group: dist.ProcessGroup, loop: str, folder: str, layers: str | None = None, least: int = 1
) -> dict[str, Any]:
    """A loop by plain DDP, recorded, and with all values sent by top-k, which is plain DDP to a rounding."""

    def compress(model: Any, optimizer: Any) -> Any:
        plan = Plan.uniform(model, "topk", density=1.0, minimum_numel=least, wrappers=[Wrap("error_feedback")])
        rules = {"bytes_sent": "ignore"}
        return gradlab.compress(
            model, plan, optimizer=optimizer, rules=rules, process_group=SPARE.get(dist.get_world_size(group))
        )

    path = Path(folder) / loop.replace(" ", "-")
    expected = trained(group, loop, lambda model, optimizer: None)
    recorded = trained(
        group, loop, lambda model, optimizer: TraceRecorder(model, path, optimizer=optimizer, layers=layers)
    )
    dist.barrier(group)
    with Trace(path, allow_empty=True) as trace:
        steps = len(trace.steps)
    result = {
        "drift": expected["drift"],
        "recorded": {"equal": torch.equal(recorded["own"], expected["own"]), "steps": steps, "said": recorded["said"]},
    }
    try:
        one = trained(group, loop, compress)
    except GradlabError as error:
        return {**result, "refused": str(error)}
    difference = float((one["own"] - expected["own"]).abs().max())
    compressed = {"difference": difference, "rules": one["rules"], "said": one["said"]}
    return {**result, "compressed": {**compressed, "iteration": one["state"].iteration}}


# --- other reports ---------------------------------------------------------------------------------------------------


def first_step_dense(group: dist.ProcessGroup) -> list[float]:
    """PowerSGD from the second step on, by many buckets that DDP makes anew then, and by one: parameters, far apart."""
    ends = []
    for megabytes in (0.001, 25.0):
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=megabytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        plan = Plan.uniform(model, "powersgd", rank=2, warmup_steps=1, minimum_numel=1)
        draw = torch.Generator().manual_seed(7 + dist.get_rank(group))
        with gradlab.compress(model, plan, optimizer=optimizer, deterministic=True, rules="ignore"):
            for _ in range(2 * STEPS):
                plain(model, optimizer, lambda draw=draw: torch.randn(8, 16, generator=draw))  # type: ignore[misc]
        ends.append(torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]))
    return [float((ends[0] - ends[1]).abs().max()), float(ends[0].abs().max())]


def one_bit_adam_under_a_scaler(group: dist.ProcessGroup) -> dict[str, Any]:
    """A loss scaler that begins far too high, so that steps are skipped before and after compression begins."""
    model = DistributedDataParallel(network(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=4)
    wrappers = [Wrap("onebit_adam"), Wrap("error_feedback")]
    plan = Plan.uniform(model, "sign", minimum_numel=1, wrappers=wrappers, warmup_steps=4)
    draw, losses, scales = torch.Generator().manual_seed(7 + dist.get_rank(group)), [], []
    options = {"optimizer": optimizer, "scaler": scaler, "process_group": SPARE.get(dist.get_world_size(group))}
    with gradlab.compress(model, plan, **options) as state:
        for _ in range(40):
            optimizer.zero_grad()
            found = 1e4 * loss(model, torch.randn(8, 16, generator=draw))
            scaler.scale(found).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(found.item())
            scales.append(scaler.get_scale())
        rules = [one.rule for one in state.findings]
    return {"losses": losses, "scales": scales, "rules": rules}


def sharded_optimizer(group: dist.ProcessGroup) -> dict[str, Any]:
    """A ZeroRedundancyOptimizer of SGD with momentum, under a plan with momentum, and under one without."""
    said, drift = "", 1.0
    for wrapper in ("momentum", "error_feedback"):
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, process_group=group, lr=0.05, momentum=0.9
        )
        plan = Plan.uniform(model, "topk", density=0.1, minimum_numel=1, wrappers=[Wrap(wrapper)])
        draw = torch.Generator().manual_seed(7 + dist.get_rank(group))
        spare = SPARE.get(dist.get_world_size(group))
        try:
            with gradlab.compress(model, plan, optimizer=optimizer, process_group=spare) as state:
                for _ in range(STEPS):
                    plain(model, optimizer, lambda draw=draw: torch.randn(8, 16, generator=draw))  # type: ignore[misc]
            own = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            first = own.clone()
            dist.broadcast(first, 0, group=group)
            drift = float((own - first).abs().max())
        except GradlabError as error:
            said = str(error)
    return {
        "refused": said,
        "drift": drift,
        "iteration": state.iteration,
        "rules": [one.rule for one in state.findings],
    }
