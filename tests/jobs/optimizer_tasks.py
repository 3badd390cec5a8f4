"""Tasks for a pool of ranks: runs with several optimizers, and with parameter groups that are added later."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradlab.codec import Tensors
from gradlab.errors import GradlabError
from gradlab.plan import Plan, Wrap
from gradlab.runtime import Exchange

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
    }
