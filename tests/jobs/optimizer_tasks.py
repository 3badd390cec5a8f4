"""Tasks for a pool of ranks: runs with several optimizers, and with parameter groups that are added later."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradlab import compress
from gradlab.codec import Tensors
from gradlab.ddp.optimizers import load_states, saved_states
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Plan, Wrap
from gradlab.runtime import Exchange
from support.two_optimizers import muon_and_adamw

STEPS = 8
Optimizers = list[torch.optim.Optimizer]


def network() -> nn.Sequential:
    """Two layers of one seed, in float64: only roundings remain."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)).double()


def plan_of(model: nn.Module, wrapper: str = "error_feedback", **settings: Any) -> Plan:
    return Plan.uniform(model, "topk", density=0.1, wrappers=[Wrap(wrapper, settings)])


def train(
    group: dist.ProcessGroup,
    optimizers: Optimizers,
    model: nn.Sequential,
    given: object,
    at: Mapping[int, Callable[[], None]],
) -> tuple[Exchange, dict[int, Tensors]]:
    """Train by an Exchange. Returns it, and the mean gradients of each step. at: what is done before which step."""
    exchange = Exchange(plan_of(model), model.named_parameters(), group, optimizer=given)
    stream = torch.Generator().manual_seed(dist.get_rank(group))
    means: dict[int, Tensors] = {}
    for step in range(STEPS):
        at.get(step, lambda: None)()
        inputs = torch.randn(8, 16, generator=stream, dtype=torch.float64)
        model.zero_grad()
        (model(inputs) - inputs).square().sum(1).mean().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        means[step] = {name: _mean(gradient, group) for name, gradient in gradients.items()}
        exchange.step(gradients)
        for optimizer in optimizers:
            optimizer.step()
    return exchange, means


def _mean(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = value.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def several_are_as_one_of_groups(group: dist.ProcessGroup) -> dict[str, Any]:
    """The same training with a list, a tuple and a dict of two optimizers as with one of two groups: parameters."""
    ended, statements = [], []
    for kind in ("one", "list", "tuple", "dict", "iterator"):
        model = network()
        apart = [list(layer.parameters()) for layer in model]
        if kind == "one":
            optimizers: Optimizers = [torch.optim.SGD([{"params": one, "lr": 0.01} for one in apart])]
        else:
            optimizers = [torch.optim.SGD(one, lr=0.01) for one in apart]
        last = optimizers[-1].param_groups[-1]
        forms: dict[str, Any] = {"one": optimizers[0], "list": optimizers, "tuple": tuple(optimizers)}
        forms |= {"dict": dict(enumerate(optimizers)), "iterator": iter(optimizers)}

        def slower(last: dict[str, Any] = last) -> None:
            last["lr"] = torch.tensor(0.002)  # also a rate that is a tensor

        exchange, _ = train(group, optimizers, model, forms[kind], {4: slower})
        with exchange:
            statements.append(exchange.report()["residuals"])
        ended.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return {"equal": all(torch.equal(ended[0], one) for one in ended), "statements": sorted(set(statements))}


def a_group_added_later(group: dist.ProcessGroup) -> dict[str, float]:
    """How far x - eta e is from SGD's recurrence, for a layer that an optimizer holds from the middle of a run on."""
    model, rate = network(), 0.01
    first, later = model[0].weight, model[1].weight
    optimizer = torch.optim.SGD([first], lr=rate)
    start = later.detach().clone()

    def join() -> None:
        assert torch.equal(later, start)
        optimizer.add_param_group({"params": [later]})

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exchange, means = train(group, [optimizer], model, optimizer, {4: join})
    with exchange:
        states = exchange.state_dict()["states"]
        (own,) = (value for key, value in states.items() if key.endswith("1.weight/residual"))
        owed = _mean(own.double(), group)
        expected = start - rate * sum(means[step]["1.weight"] for step in range(4, STEPS))
        away = later.detach() - rate * owed - expected
        return {"away": float(away.norm() / (rate * owed).norm()), "owed": float(owed.norm())}


def muon_in_ddp(group: dist.ProcessGroup) -> dict[str, Any]:
    """[Muon, AdamW] under DDP: nothing compressed beside plain DDP, top-k stopped and resumed, and under a scaler."""

    def run(plan: Plan | None, steps: range, saved: Any = None, scaler: Any = None) -> Any:
        torch.manual_seed(0)
        bare = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        bare[0].bias.requires_grad_(False)  # in no optimizer, and in no plan
        model = DistributedDataParallel(bare, process_group=group)
        optimizers = muon_and_adamw([one for one in bare.parameters() if one.requires_grad])
        options = {"optimizer": optimizers, "scaler": scaler, "deterministic": True}
        with nullcontext() if plan is None else compress(model, plan, **options) as state:
            if saved is not None:
                bare.load_state_dict(saved["model"])
                load_states(optimizers, saved["optimizers"])
                state.load_state_dict(saved["gradlab"])
            for step in steps:
                inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank(group)))
                model.zero_grad()
                loss = (model(inputs) - inputs).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                for one in optimizers:
                    one.step() if scaler is None else scaler.step(one)
                scaler is None or scaler.update()
            kept = None if state is None else state.state_dict()
            told = "" if state is None else state.report()["residuals"]
        ended = {"model": bare.state_dict(), "optimizers": saved_states(optimizers), "gradlab": kept}
        return copy.deepcopy(ended), told

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(one["model"][name], value) for name, value in other["model"].items())

    layers = [Layer(name, shape) for name, shape in (("0.weight", (32, 16)), ("2.weight", (16, 32)), ("2.bias", (16,)))]
    topk, steps = Plan.uniform(layers, "topk", density=0.1, minimum_numel=1), range(STEPS)
    plain, identity = run(None, steps)[0], run(Plan(layers, ()), steps)[0]
    whole, told = run(topk, steps)
    resumed, _ = run(topk, range(5, STEPS), run(topk, range(5))[0])
    scaled, _ = run(topk, steps, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
    return {
        "plain DDP": same(plain, identity),
        "resumed": same(whole, resumed) and whole["gradlab"]["sha256"] == resumed["gradlab"]["sha256"],
        "scaled": same(whole, scaled),
        "compressed differs": not same(whole, plain),
        "told": told,
    }


def ratio_of_its_own_rate(group: dist.ProcessGroup) -> dict[str, float]:
    """By layer the factor on its residual in the step after each optimizer's rate has changed."""
    model = network()
    muon = torch.optim.Muon(model[0].parameters(), lr=0.5)
    sgd = torch.optim.SGD(model[1].parameters(), lr=0.5)
    plan, named = plan_of(model, step_size_ratio=True), dict(model.named_parameters())
    stream = torch.Generator().manual_seed(dist.get_rank(group))
    first, means = ({name: torch.randn(16, 16, generator=stream).double() for name in named} for _ in range(2))
    with Exchange(plan, named.items(), group, optimizer=[muon, sgd]) as exchange:
        exchange.step(first)
        before = dict(exchange.state_dict()["states"])
        muon.param_groups[0]["lr"], sgd.param_groups[0]["lr"] = 0.25, 0.125
        given = {name: _mean(one, group) for name, one in means.items()}
        exchange.step(means)
        after = exchange.state_dict()["states"]
    factors = {}
    for name in named:
        ((old, new),) = [(before[key], after[key]) for key in before if key.endswith(f"{name}/residual")]
        due = _mean(new, group) + means[name] - given[name]
        factors[name] = round(float((due * _mean(old, group)).sum() / _mean(old, group).square().sum()), 6)
        assert torch.allclose(due, factors[name] * _mean(old, group), atol=1e-6)
    return factors


def what_is_refused(group: dist.ProcessGroup) -> dict[str, str]:
    """What is said of optimizers and plans that do not go together, or that say too little."""

    def attempt(given: Callable[[Optimizers], object], wrapper: str, momentum: float = 0.0, **settings: Any) -> str:
        model = network()
        both: Optimizers = [
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=momentum),
        ]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                Exchange(
                    plan_of(model, wrapper, **settings), model.named_parameters(), group, optimizer=given(both)
                ).close()
            except GradlabError as error:
                return str(error)
        return " ".join(str(one.message) for one in caught if "gradlab" in one.filename)

    def later(added_momentum: float) -> str:
        model = network()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exchange = Exchange(plan_of(model, "local_momentum"), model.named_parameters(), group, optimizer=optimizer)
        optimizer.add_param_group({"params": list(model[1].parameters()), "momentum": added_momentum})
        try:
            exchange.step({name: torch.zeros_like(p) for name, p in model.named_parameters()})
        except GradlabError as error:
            return str(error)
        finally:
            exchange.close()
        return ""

    def made_later() -> str:
        model = network()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exchange = Exchange(plan_of(model), model.named_parameters(), group, optimizer=optimizer)
        other = torch.optim.SGD(model[1].parameters(), lr=0.1)
        said = ""
        try:
            other.step()
        except GradlabError as error:
            said = str(error)
        exchange.close()
        other.step()  # nobody minds any more
        return said

    return {
        "both": attempt(lambda both: both, "local_momentum", 0.9),
        "both plain": attempt(tuple, "local_momentum"),
        "one": attempt(lambda both: both[0], "local_momentum"),
        "rates of one": attempt(lambda both: both[0], "error_feedback"),
        "set rates of one": attempt(lambda both: [both[0]], "error_feedback", step_size_ratio=True),
        "kept of one": attempt(lambda both: both[:1], "error_feedback", step_size_ratio=False),
        "added later": later(0.9),
        "added plain": later(0.0),
        "made later": made_later(),
        "twice": attempt(lambda both: [*both, torch.optim.AdamW(both[1].param_groups[0]["params"])], "error_feedback"),
    }
