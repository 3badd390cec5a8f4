"""Tasks for real ranks: outer steps against oracles that simulate all workers in one process, and resumed runs."""

from __future__ import annotations

import copy
import io
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlab
from gradlab.codec import Tensors
from gradlab.ddp.groups import part_of
from gradlab.ddp.optimizers import all_optimizers, load_states, saved_states
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import layers_of
from gradlab.plan import FEEDBACK, Group, Plan, Wrap
from gradlab.plan.shards import fragments_of
from gradlab.runtime import Exchange, OuterStep
from support.two_optimizers import muon_and_adamw

KEPT: list[Exception] = []  # errors that `lost` met

LR, MOMENTUM = 0.7, 0.9
NESTEROV = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM, nesterov=True, fused=True)
SEVERAL: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "powersgd": {"rank": 2},
    "chunk_topk": {"chunk": 64, "count": 6},
    "ecsq": {"bits": 1.0},
}


def network() -> nn.Module:
    """A network of four matrices; the same values wherever it is built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = (20, 30, 24, 18, 5)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(*[one for layer in layers for one in (layer, nn.Tanh())][:-1])


def batch(worker: int, step: int, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * worker + part)
    inputs = torch.randn(8, 20, generator=generator)
    return inputs, inputs[:, :5].sin() + 0.1 * torch.randn(8, 5, generator=generator)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.003)


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return muon_and_adamw(model.parameters())


def muon_outside(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    matrices, others = ([one for one in parameters if (one.ndim == 2) == wanted] for wanted in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(others, lr=LR, momentum=MOMENTUM, nesterov=True)]


def inner_step(model: nn.Module, optimizer: Any, worker: int, step: int, part: int = 0) -> None:
    inputs, wanted = batch(worker, step, part)
    model.zero_grad()
    (model(inputs) - wanted).square().mean().backward()
    for one in all_optimizers(optimizer):
        one.step()


def parameters_of(model: nn.Module) -> Tensors:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plan_of(codec: str, settings: dict[str, Any]) -> Plan:
    layers = layers_of(network())
    if codec == "identity":
        return Plan(layers, ())
    if codec == "several":  # each matrix by another one; biases are dense
        matrices = [layer.name for layer in layers if len(layer.shape) > 1]
        kinds = zip(matrices, SEVERAL.items(), strict=True)
        return Plan(layers, tuple(Group(name, (name,), one, own, FEEDBACK) for name, (one, own) in kinds))
    return Plan.uniform(layers, codec, minimum_numel=100, **settings)


@dataclass
class Rules:
    """What makes a worker's own optimizers, and the outer ones."""

    inner: Callable[[nn.Module], Any] = adamw
    outer: Callable[[list[Any]], Any] = NESTEROV


RULES = {"DiLoCo": Rules(), "MuLoCo": Rules(muon), "Muon outside": Rules(muon, muon_outside)}


class Oracle:
    """All workers in one process: DiLoCo's Algorithm 1, and Streaming DiLoCo's Algorithm 2, in plain formulas.

    Means of pseudo-gradients are those of lockstep. exact: the outer step is torch's, or that of `rules`.
    """

    def __init__(
        self, plan: Plan, workers: int, every: int, fragments: int, delay: int, mixing: float, rules: Rules, exact: bool
    ) -> None:
        self.exact = exact
        self.models = [network() for _ in range(workers)]
        self.optimizers = [rules.inner(model) for model in self.models]
        self.every, self.delay, self.mixing = every, delay, mixing
        self.parts = fragments_of(plan, fragments)
        self.lockstep = [LockstepPlan(part, workers) for part in self.parts]
        self.common = parameters_of(self.models[0])
        self.outer = all_optimizers(rules.outer(list(self.common.values())))
        self.velocity: Tensors = {}
        self.sent: dict[int, list[tuple[int, Tensors]]] = {}
        self.rounds = [0] * fragments

    def step(self, number: int) -> None:
        """Local step `number`, from 1, of all workers, and what follows it."""
        for worker, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            inner_step(model, optimizer, worker, number)
        for fragment in range(len(self.parts)):
            for landing, mean in self.sent.pop(number, []):
                if landing == fragment:
                    self._apply(mean)
                else:
                    self.sent.setdefault(number, []).append((landing, mean))
            offset = (fragment + 1) * self.every // len(self.parts)
            if number >= offset and (number - offset) % self.every == 0:
                mean = self._mean(fragment)
                if self.delay:
                    self.sent.setdefault(number + self.delay, []).append((fragment, mean))
                else:
                    self._apply(mean)

    def _mean(self, fragment: int) -> Tensors:
        """The mean of how far the workers are from the common parameters."""
        names = [layer.name for layer in self.parts[fragment].layers]
        workers = [dict(model.named_parameters()) for model in self.models]
        pseudo = [{name: self.common[name] - own[name].detach() for name in names} for own in workers]
        result = self.lockstep[fragment].step(
            self.rounds[fragment], [{n: t.clone() for n, t in p.items()} for p in pseudo]
        )
        self.rounds[fragment] += 1
        means = {name: tensor for ranks in result.exchanged.values() for name, tensor in ranks[0].mean.items()}
        for name in names:
            if name not in means:  # a dense layer: the sum in rank order, as lockstep has it
                total = torch.zeros_like(pseudo[0][name])
                for one in pseudo:
                    total += one[name] * (1.0 / len(pseudo))
                means[name] = total
        return means

    def _apply(self, mean: Tensors) -> None:
        """Nesterov: v = mu v + g, x -= lr (g + mu v)."""
        if self.exact:
            self._apply_exactly(mean)
            return
        for name, gradient in mean.items():
            before = self.velocity.get(name)
            self.velocity[name] = gradient.clone() if before is None else MOMENTUM * before + gradient
            self.common[name] = self.common[name] - LR * (gradient + MOMENTUM * self.velocity[name])
            for model in self.models:
                value = dict(model.named_parameters())[name]
                share = self.mixing if self.delay else 0.0
                value.data = share * value.data + (1 - share) * self.common[name]

    def _apply_exactly(self, mean: Tensors) -> None:
        for name, gradient in mean.items():
            self.common[name].grad = gradient
        for one in self.outer:
            one.step()
            one.zero_grad(set_to_none=True)
        for model in self.models:
            for name, value in model.named_parameters():
                if name in mean:
                    common = self.common[name]
                    value.data = torch.lerp(common, value.data, self.mixing) if self.delay else common.clone()


def against_oracle(
    group: dist.ProcessGroup,
    codec: str,
    settings: dict[str, Any],
    every: int,
    fragments: int,
    delay: int,
    outer_steps: int,
    exact: bool = False,
    rules: str = "DiLoCo",
) -> dict[str, Any]:
    """The largest relative distance of this worker's and of the common parameters from the oracle's, over the run."""
    rank, workers, chosen = dist.get_rank(group), dist.get_world_size(group), RULES[rules]
    plan, model = plan_of(codec, settings), network()
    oracle, optimizer = Oracle(plan, workers, every, fragments, delay, 0.5, chosen, exact), chosen.inner(model)
    farthest, changes = 0.0, 0
    numbers: dict[str, Any] = {"every": every, "fragments": fragments, "delay": delay, "group": group}
    numbers |= {} if chosen.outer is NESTEROV else {"outer_optimizer": chosen.outer}
    with gradlab.compress(model, plan, deterministic=True, **numbers) as outer:
        for step in range(1, every * outer_steps + 1):
            inner_step(model, optimizer, rank, step)
            changes += outer.step()
            oracle.step(step)
            theirs = dict(oracle.models[rank].named_parameters())
            for name, parameter in model.named_parameters():
                farthest = max(farthest, _distance(parameter, theirs[name]))
        for fragment in outer.fragments:
            for name, common in fragment.parameters.items():
                farthest = max(farthest, _distance(common, oracle.common[name]))
        return {"farthest": farthest, "changes": changes, "outer": outer.outer_steps, "report": outer.report()}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.detach() - other.detach()).norm() / other.detach().norm().clamp_min(1e-12))


def synchronous(group: dist.ProcessGroup, steps: int = 20) -> float:
    """H = 1 with plain outer SGD of rate 1, beside synchronous SGD on the mean of the gradients: the distance."""
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    model, whole = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = partial(torch.optim.SGD, lr=1.0)
    with OuterStep(plan_of("identity", {}), model, rule, every=1, group=group) as outer:
        for step in range(steps):
            inner_step(model, optimizer, rank, step)
            outer.step()
            gradients = []
            for worker in range(workers):
                copied = copy.deepcopy(whole)
                inputs, wanted = batch(worker, step)
                (copied(inputs) - wanted).square().mean().backward()
                gradients.append([parameter.grad for parameter in copied.parameters()])
            for parameter, of_workers in zip(whole.parameters(), zip(*gradients, strict=True), strict=True):
                parameter.data -= 0.1 * torch.stack(of_workers).mean(0)
    return max(_distance(one, other) for one, other in zip(model.parameters(), whole.parameters(), strict=True))


def _run(outer: OuterStep, model: nn.Module, optimizer: Any, rank: int, steps: Iterator[int]) -> None:
    for step in steps:
        inner_step(model, optimizer, rank, step)
        outer.step()


def resumed(
    group: dist.ProcessGroup,
    codec: str,
    settings: dict[str, Any],
    fragments: int,
    delay: int,
    stop: int,
    steps: int,
    rules: str = "DiLoCo",
) -> dict[str, Any]:
    """A run that stops after a step and goes on from bytes, beside one that never stopped: equal bit for bit?"""
    rank, chosen = dist.get_rank(group), RULES[rules]
    numbers: dict[str, Any] = {"every": 6, "fragments": fragments, "delay": delay, "deterministic": True}
    make = partial(OuterStep, plan_of(codec, settings), outer_optimizer=chosen.outer, group=group, **numbers)
    whole = network()
    optimizer = chosen.inner(whole)
    with make(whole) as outer:
        _run(outer, whole, optimizer, rank, iter(range(steps)))
        states = outer.state_dict()
    first = network()
    optimizer, file = chosen.inner(first), io.BytesIO()
    with make(first) as outer:
        _run(outer, first, optimizer, rank, iter(range(stop)))
        in_flight = sum(one.flight is not None for one in outer.fragments)
        own = saved_states(all_optimizers(optimizer))
        parts = {"model": first.state_dict(), "optimizer": own, "outer": outer.stateful.state_dict()}
        torch.save(parts, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = network()
    optimizer = chosen.inner(second)
    with make(second) as outer:
        second.load_state_dict(saved["model"])
        load_states(all_optimizers(optimizer), saved["optimizer"])
        outer.stateful.load_state_dict(saved["outer"])
        _run(outer, second, optimizer, rank, iter(range(stop, steps)))
        again = outer.state_dict()
    same = all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    return {"same": same, "same_state": states["sha256"] == again["sha256"], "in_flight": in_flight}


def worker_of_two(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], delay: int) -> dict[str, Any]:
    """Workers of two ranks in DDP each, beside workers of one rank with the mean of both ranks' gradients."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    worker, part = divmod(rank, 2)
    inside = part_of((group,), [2 * worker, 2 * worker + 1], None, torch.device("cpu"))
    model = DistributedDataParallel(network(), process_group=inside)
    optimizer, numbers = adamw(model), {"every": 4, "delay": delay, "fragments": 2, "deterministic": True}
    with OuterStep(plan_of(codec, settings), model, group=group, **numbers) as outer:
        for step in range(12):
            inner_step(model, optimizer, worker, step, part)
            outer.step()
        exchanges = [fragment.exchange is not None for fragment in outer.fragments]
        count = outer.workers.count
    mine = parameters_of(model.module)
    firsts = [2 * one for one in range(ranks // 2)]
    alone = part_of((group,), firsts if part == 0 else [rank], None, torch.device("cpu"))
    distance = 0.0
    if part == 0:  # the same by workers of one rank, in the first rank of each
        single = network()
        optimizer = adamw(single)
        with OuterStep(plan_of(codec, settings), single, group=alone, **numbers) as outer:
            for step in range(12):
                both = [batch(worker, step, one) for one in (0, 1)]
                optimizer.zero_grad()
                (sum((single(x) - y).square().mean() for x, y in both) / 2).backward()
                optimizer.step()
                outer.step()
        distance = max(_distance(mine[name], value) for name, value in parameters_of(single).items())
    together = [torch.zeros(1) for _ in range(2)]
    checksum = torch.stack([value.double().sum() for value in mine.values()]).sum().float().reshape(1)
    dist.all_gather(together, checksum, group=inside)
    return {
        "distance": distance,
        "exchanges": exchanges,
        "workers": count,
        "same_inside": bool(torch.equal(together[0], together[1])),
    }


def sharded_worker(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], delay: int) -> dict[str, Any]:
    """Workers of two ranks under FSDP2, beside the same workers under DDP: the distance of the whole parameters."""
    worker, part = divmod(dist.get_rank(group), 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("between", "within"))
    numbers = {"every": 4, "delay": delay, "fragments": 2, "deterministic": True}
    sharded = network()
    for module in sharded:
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh["within"])
    fully_shard(sharded, mesh=mesh["within"])
    whole = DistributedDataParallel(network(), process_group=mesh["within"].get_group())
    plan, said = plan_of(codec, settings), ""
    try:
        OuterStep(plan, sharded, muon_outside, group=group, within=mesh["within"], **numbers)
    except GradlabError as error:
        said = str(error)
    whole_parameters = []
    for model, within in ((sharded, mesh["within"]), (whole, "model")):
        optimizer = adamw(model)
        with OuterStep(plan, model, group=group, within=within, **numbers) as outer:
            for step in range(12):
                inner_step(model, optimizer, worker, step, part)
                changed = outer.step()
            state = outer.state_dict()
            outer.load_state_dict(state)
        parameters = list(model.parameters())
        whole_parameters.append([p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters])
    distance = max(_distance(one, other) for one, other in zip(*whole_parameters, strict=True))
    return {"distance": distance, "changed": changed, "workers": outer.workers.count, "said": said}


def not_finite(group: dist.ProcessGroup, codec: str, settings: dict[str, Any], delay: int) -> dict[str, Any]:
    """The last worker's parameters become infinite before the second outer step: all go back, and go on."""
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    model = network()
    optimizer, seen = adamw(model), []
    with (
        OuterStep(plan_of(codec, settings), model, every=3, delay=delay, group=group) as outer,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for step in range(1, 13):
            inner_step(model, optimizer, rank, step)
            if step == 6 and rank == workers - 1:
                next(model.parameters()).data.view(-1)[0] = torch.inf
            outer.step()
            seen.append(all(bool(p.isfinite().all()) for p in model.parameters()))
        said = [str(one.message) for one in caught if "go back" in str(one.message)]
        common = {n: p.detach().clone() for f in outer.fragments for n, p in f.parameters.items()}
        sums = [torch.zeros(1, dtype=torch.float64) for _ in range(workers)]
        dist.all_gather(sums, torch.stack([t.double().sum() for t in common.values()]).sum().reshape(1), group=group)
    return {"seen": seen, "said": said, "outer": outer.outer_steps, "agree": len({float(one) for one in sums}) == 1}


def more_workers(group: dist.ProcessGroup, residuals: str) -> dict[str, Any]:
    """Two workers stop; four go on from their states."""
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    two = part_of((group,), [0, 1] if rank < 2 else [2, 3], None, torch.device("cpu"))
    plan, states = plan_of("topk", {"density": 0.1}), [b"", b""]
    model = network()
    optimizer = adamw(model)
    with OuterStep(plan, model, every=4, group=two) as outer:
        _run(outer, model, optimizer, rank % 2, iter(range(8)))
        file = io.BytesIO()
        torch.save({"outer": outer.state_dict(), "model": model.state_dict()}, file)
        common = {n: p.detach().clone() for f in outer.fragments for n, p in f.parameters.items()}
    dist.all_gather_object(states, file.getvalue(), group=two)
    saved = [torch.load(io.BytesIO(one), weights_only=True) for one in states]
    with OuterStep(plan, model, every=4, group=group) as outer:
        model.load_state_dict(saved[rank % 2]["model"])
        outer.load_state_dicts([one["outer"] for one in saved], residuals)
        kept = all(torch.equal(common[n], p) for f in outer.fragments for n, p in f.parameters.items())
        mean = _mean_residual(outer, group)
        two_mean = {
            key: sum(one["outer"]["fragments"]["0"]["exchange"]["states"][key] for one in saved) / 2
            for key in saved[0]["outer"]["fragments"]["0"]["exchange"]["states"]
            if key.endswith("residual")
        }
        same = all(torch.allclose(mean[key], value, atol=1e-6) for key, value in two_mean.items())
        _run(outer, model, optimizer, rank, iter(range(8, 16)))
        return {"kept": kept, "same_mean": same, "outer": outer.outer_steps, "workers": workers}


def _mean_residual(outer: OuterStep, group: dist.ProcessGroup) -> Tensors:
    exchange = outer.fragments[0].exchange
    assert exchange is not None
    found = {}
    for name, state in exchange.run.states.items():
        for key, tensor in state.items():
            if key.endswith("residual"):
                total = tensor.clone()
                dist.all_reduce(total, group=group)
                found[f"{name}::{key}"] = total / dist.get_world_size(group)
    return found


def sixteen_bits(group: dist.ProcessGroup) -> dict[str, Any]:
    """A bfloat16 model whose workers come by 2 every step: outer steps of rate 1e-3 from 1 are lost in 16 bits."""
    rank, model = dist.get_rank(group), nn.Linear(4, 4, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    rule = partial(torch.optim.SGD, lr=1e-3)
    with OuterStep(Plan(layers_of(model), ()), model, rule, every=1, group=group) as outer:
        for _ in range(20):
            with torch.no_grad():
                model.weight += 2.0 if rank == 0 else 1.0
            outer.step()
        [common] = outer.fragments[0].parameters.values()
        return {"dtype": str(common.dtype), "common": float(common.mean()), "model": float(model.weight.float().mean())}


def lost(group: dist.ProcessGroup, delay: int) -> dict[str, Any]:
    """The last worker's training ends with an error of its own: what the others' says, and how long that takes.

    All keep their errors: these must not hold the group open, in which others wait.
    """
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    model = network()
    optimizer, began, said, step = adamw(model), time.monotonic(), "", 0
    try:
        with OuterStep(plan_of("topk", {"density": 0.1}), model, every=3, delay=delay, group=group) as outer:
            for step in range(1, 12):
                inner_step(model, optimizer, rank, step)
                if step == 5 and rank == workers - 1:
                    raise ValueError("no more data")
                outer.step()
    except (ValueError, GradlabError) as error:
        said = str(error)
        KEPT.append(error)
    return {"said": said, "step": step, "seconds": time.monotonic() - began}


def left_before_it_failed(group: dist.ProcessGroup) -> str | None:
    """The last worker leaves while its exchange is under way in another thread, where that becomes an error: the reason
    that it has itself, and that the others find."""
    rank, workers = dist.get_rank(group), dist.get_world_size(group)
    exchange = Exchange(plan_of("topk", {"density": 0.1}), network().named_parameters(), group)
    driver = exchange._driver
    if rank == workers - 1:
        driver.leave("ValueError: no more data")
        said: str | None = driver.fail(GradlabError("the end of a step came before the step had begun"))
    else:
        said = driver._reasons.find()
    dist.barrier(group)
    exchange.close()
    return said


def warned(group: dist.ProcessGroup) -> list[tuple[bool, list[str]]]:
    """Plans with and without feedback under outer optimizers with and without momentum: what is warned of."""
    seen = []
    servers = [Wrap("two_way", {"error_feedback": False}), Wrap("two_way"), Wrap("two_way", {"from_ranks": 5})]
    for wrappers, momentum in itertools.product(([], FEEDBACK, *([one] for one in servers)), (0.0, 0.9)):
        plan = Plan.uniform(network(), "topk", density=0.1, wrappers=wrappers)
        rule = partial(torch.optim.SGD, lr=1.0, momentum=momentum)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            OuterStep(plan, network(), rule, group=group).close()
        seen.append((bool(momentum), [str(one.message) for one in said if "gradlab: " in str(one.message)]))
    return seen


def by_name(group: dist.ProcessGroup) -> dict[str, Any]:
    """A codec's name in place of a plan, of a model in DDP too; and under plain averages."""
    model = network()
    own = part_of((group,), [dist.get_rank(group)], None, torch.device("cpu"))
    with OuterStep("topk", model, group=group) as outer:
        alike = outer.plan == Plan.uniform(model, "topk", exchanges="pseudo-gradients")
    with OuterStep("topk", DistributedDataParallel(model, process_group=own), group=group) as outer:
        in_ddp = outer.plan == Plan.uniform(model, "topk", exchanges="pseudo-gradients")
    with OuterStep("topk", model, partial(torch.optim.SGD, lr=1.0), group=group) as outer:
        averaged = outer.plan == Plan.uniform(model, "topk")
    return {"alike": alike, "in ddp": in_ddp, "averaged": averaged}


def refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What `OuterStep` says of wrong use."""
    rank, said = dist.get_rank(group), {}
    plan = plan_of("topk", {"density": 0.1})
    cases: dict[str, Any] = {
        "every": lambda: OuterStep(plan, network(), every=0, group=group),
        "delay": lambda: OuterStep(plan, network(), every=4, delay=4, group=group),
        "mixing": lambda: OuterStep(plan, network(), mixing=1.0, group=group),
        "too many fragments": lambda: OuterStep(plan, network(), every=2, fragments=3, group=group),
        "uncut": lambda: OuterStep(plan, network(), every=30, fragments=20, group=group),
        "other plan": lambda: OuterStep(plan, nn.Linear(3, 2), group=group),
        "no model": lambda: OuterStep(plan, [1], group=group),
        "an optimizer": lambda: OuterStep(
            plan, network(), torch.optim.SGD(network().parameters(), lr=1.0), group=group
        ),
        "other numbers": lambda: OuterStep(plan, network(), every=4 + rank, group=group),
        "in ddp": lambda: OuterStep(plan, DistributedDataParallel(network(), process_group=group), group=group),
        "scaler": lambda: OuterStep(plan, network(), group=group, scaler=None),
        "manager and group": lambda: OuterStep(plan, network(), manager=object(), group=group),
        "manager and delay": lambda: OuterStep(plan, network(), manager=object(), delay=2),
        "no manager": lambda: OuterStep(plan, network(), manager=object()),
        "file": lambda: OuterStep("nothing.safetensors" if rank else plan, network(), group=group),
    }
    for name, make in cases.items():
        try:
            make()
            said[name] = "nothing"
        except GradlabError as error:
            said[name] = str(error)
    with OuterStep(plan, network(), every=4, group=group) as outer:
        state = outer.state_dict()
        for name, change in {
            "another H": {"every": 5},
            "damaged": {"local_steps": 3},
            "no state": None,
        }.items():
            try:
                outer.load_state_dict([] if change is None else {**state, **change})  # type: ignore[arg-type]
                said[name] = "nothing"
            except GradlabError as error:
                said[name] = str(error)
    try:
        outer.step()
    except GradlabError as error:
        said["closed"] = str(error)
    return said
