"""1-bit Adam and 0/1 Adam's variance: Adam itself where nothing is compressed, and no NaN where inputs are dead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlab.codec import Tensors
from gradlab.codec.kept import state_problem
from gradlab.ddp.optimizers import describe_optimizer
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import layers_of, named_layers
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.optimizer_rules import conflict_of
from gradlab.wrappers.onebit_adam import moves_variance
from support.laws import thorough

RATE, CLASSES, INPUTS, DEAD = 0.01, 4, 24, 6
ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def batch(rank: int, step: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes around their centres; the last inputs are always 0."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(7))
    labels = torch.randint(CLASSES, (count,), generator=draw)
    inputs = centres[labels] + 1.5 * torch.randn(count, INPUTS, generator=draw)
    inputs[:, -DEAD:] = 0
    return inputs, labels


def gradients(net: nn.Module, rank: int, step: int) -> Tensors:
    inputs, labels = batch(rank, step)
    net.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(net(inputs), labels).backward()
    return {layer.name: parameter.grad.clone() for layer, parameter in named_layers(net) if parameter.grad is not None}


class Noting(LockstepPlan):
    """Keeps what every group's exchange applies, in the schedule's dense iterations too."""

    def _exchange(self, group: str, steps: Any, bill: Any) -> Any:
        of_ranks, cost = super()._exchange(group, steps, bill)
        self.applied = {**getattr(self, "applied", {}), **of_ranks[0].mean}
        return of_ranks, cost


def train(plan: Plan, ranks: int, steps: int, weight_decay: float = 0.0) -> tuple[nn.Sequential, LockstepPlan]:
    """All ranks in lockstep, with SGD at Adam's learning rate."""
    net, lockstep = model(), Noting(plan, ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, weight_decay=weight_decay)
    parameters = {layer.name: parameter for layer, parameter in named_layers(net)}
    for step in range(steps):
        lockstep.step(step, [gradients(net, rank, step) for rank in range(ranks)])
        for name, parameter in parameters.items():
            parameter.grad = lockstep.applied[name]
        optimizer.step()
    return net, lockstep


def plan_of(codec: str = "identity", around: tuple[Wrap, ...] = (), warmup_steps: int = 0, **settings: Any) -> Plan:
    wraps = [Wrap("onebit_adam", {**ADAM, **settings}), *around]
    everything = {"minimum_dimensions": 0, "minimum_numel": 1, "warmup_steps": warmup_steps}
    return Plan.uniform(layers_of(model()), codec, wrappers=wraps, **everything)


def adam(ranks: int, steps: int, frozen_from: int, weight_decay: float = 0.0) -> nn.Module:
    """torch.optim.AdamW of the mean gradients; from a step on with the second moments of before."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=weight_decay)
    frozen: dict[Any, tuple[torch.Tensor, float]] = {}
    for step in range(steps):
        of_ranks = [gradients(net, rank, step) for rank in range(ranks)]
        for layer, parameter in named_layers(net):
            parameter.grad = sum(own[layer.name] for own in of_ranks) / ranks
        if step < frozen_from:
            optimizer.step()
            continue
        for parameter in net.parameters():  # by hand, in the order of the formulas
            state = optimizer.state[parameter]
            if parameter not in frozen:
                frozen[parameter] = state["exp_avg_sq"].clone(), float(1 - 0.99 ** int(state["step"]))
            variance, corrected = frozen[parameter]
            state["step"] += 1
            state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
            direction = state["exp_avg"] / (1 - 0.9 ** int(state["step"])) / ((variance / corrected).sqrt() + 1e-8)
            parameter.data.sub_(RATE * (direction + weight_decay * parameter.data))
    return net


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("ranks", "weight_decay"), [(1, 0.0), (3, 0.1)])
def test_where_the_variance_moves_on_it_is_adamw(ranks: int, weight_decay: float) -> None:
    """50 steps, uncompressed: torch.optim.AdamW's parameters to rounding. With kappa as large as the run v always
    moves, as it does in 1-bit Adam's warm-up."""
    plan = plan_of(variance="zero_one", kappa=100)
    ours, _ = train(plan, ranks, 50, weight_decay)
    assert distance(ours, adam(ranks, 50, 50, weight_decay)) < 2e-5


@pytest.mark.parametrize("ranks", [2, 3])
def test_with_a_frozen_variance_it_is_adam_with_one(ranks: int) -> None:
    """Uncompressed, from the first step on, whose gradient then is all that v is made of."""
    ours, lockstep = train(plan_of(), ranks, 25)
    assert distance(ours, adam(ranks, 25, 1)) < 2e-4
    assert torch.equal(lockstep.states[0]["0.weight"]["0.weight/adam_steps"], torch.tensor([25.0, 1.0]).double())


@pytest.mark.parametrize("kappa", [1, 3])
def test_the_variance_moves_in_the_iterations_of_the_paper(kappa: int) -> None:
    expected, at = set(), 0
    for update in range(40):
        expected.add(at)
        at += 2 ** (update // kappa)
        if at > 500:
            break
    assert {iteration for iteration in range(500) if moves_variance(iteration, kappa)} == {
        k for k in expected if k < 500
    }


def accuracy(net: nn.Module) -> float:
    inputs, labels = batch(99, 10_000, 2000)
    return float((net(inputs).argmax(1) == labels).float().mean())


@pytest.mark.parametrize("variance", ["frozen", thorough("zero_one")])
def test_dead_inputs_end_in_no_nan_and_accuracy_is_adams(variance: str) -> None:
    """Signs both ways with feedback, as in the papers, after a tenth of the run."""
    both_ways = (Wrap("error_feedback", {"step_size_ratio": False}), Wrap("two_way", {"step_size_ratio": False}))
    net, _ = train(plan_of("sign", both_ways, warmup_steps=20, variance=variance), 2, 120)
    assert all(bool(parameter.isfinite().all()) for parameter in net.parameters())
    dead, begun = net[0].weight[:, -DEAD:], model()[0].weight[:, -DEAD:]
    assert torch.equal(dead, begun)  # they stay where they are
    assert accuracy(net) > accuracy(adam(2, 120, 120)) - 0.03


def test_it_is_the_optimizer_and_no_other_may_be() -> None:
    """As the rule of fits and of training says of it; SGD without momentum, with weight decay, goes."""
    plan = method_plan(model(), "1-bit Adam", warmup_steps=10)
    assert [wrap.name for wrap in plan.groups[0].wrappers] == ["onebit_adam", "error_feedback", "two_way"]
    parameters = list(model().parameters())
    for make in (torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad):
        conflict = conflict_of(plan, describe_optimizer(make(parameters)))  # type: ignore[arg-type]
        assert conflict is not None
        assert "train with torch.optim.SGD without momentum" in conflict.remedy
    with_momentum = describe_optimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    assert with_momentum is not None
    assert conflict_of(plan, with_momentum) is not None
    bare = describe_optimizer(torch.optim.SGD(parameters, lr=0.1, weight_decay=0.1))
    assert bare is not None
    assert conflict_of(plan, bare) is None


def test_a_residual_that_is_a_momentum_goes_under_none() -> None:
    """SparseLoCo and DeMo: their residual fades, and is their momentum."""
    parameters = list(model().parameters())
    for name in ("SparseLoCo", "DeMo"):
        plan = method_plan(model(), name, **({"minimum_numel": 1} if name == "SparseLoCo" else {}))
        doubled = describe_optimizer(torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True))
        bare = describe_optimizer(torch.optim.SGD(parameters, lr=1.0))
        assert doubled is not None
        assert bare is not None
        assert "residual is a momentum" in str(conflict_of(plan, doubled))
        assert conflict_of(plan, bare) is None


def test_small_layers_that_are_not_compressed_are_adams_too() -> None:
    plan = Plan.uniform(layers_of(model()), "topk", wrappers=[Wrap("onebit_adam"), Wrap("error_feedback")])
    of_rest = [group for group in plan.groups if group.codec == "identity"]
    assert {name for group in of_rest for name in group.layers} >= {"0.bias", "2.bias"}
    assert {wrap.name for group in of_rest for wrap in group.wrappers} == {"onebit_adam"}


def test_uncompressed_iterations_are_counted() -> None:
    """0/1 Adam: dense bytes where v moves, the codec's elsewhere."""
    plan = plan_of("sign", (Wrap("error_feedback"),), variance="zero_one", kappa=2)
    net, lockstep = model(), LockstepPlan(plan, 2)
    sizes = [lockstep.step(step, [gradients(net, rank, 0) for rank in range(2)]).payload[0] for step in range(12)]
    dense = np.array([size > max(sizes) / 2 for size in sizes])
    assert dense.tolist() == [moves_variance(step, 2) for step in range(12)]


def test_a_state_of_halves_is_refused() -> None:
    plan = plan_of()
    codec = plan.build(plan.groups[0])
    name = plan.groups[0].layers[0]
    kept = codec.kept(plan.members(plan.groups[0]), 0, 2, plan.groups[0].name)
    moment = {f"{name}/moment": torch.zeros(kept[f"{name}/moment"].shape)}
    assert state_problem(kept, moment) == f"'{name}/variance' is missing"
    with pytest.raises(GradlabError, match="both apply momentum"):
        plan_of(around=(Wrap("local_momentum"),))
