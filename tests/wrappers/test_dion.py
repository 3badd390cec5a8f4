"""Dion against the centralized algorithm in plain numpy, the laws of its updates, and training with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradlab.codec import Batch, Context, Tensors
from gradlab.codec.kept import state_problem
from gradlab.codec.wrapper import Wrapper, resize
from gradlab.codecs.identity import Identity
from gradlab.codecs.topk import TopK
from gradlab.collectives import run_lockstep
from gradlab.ddp.optimizers import describe_optimizer
from gradlab.errors import GradlabError
from gradlab.executor import LockstepPlan
from gradlab.layout import Layer, named_layers
from gradlab.plan import Plan, Wrap, method_plan
from gradlab.plan.optimizer_rules import conflict_of, wrapper_that
from gradlab.plan.shards import shard_plan
from gradlab.wrappers.dion import Dion, unit_rows

WEIGHT, TURNED, CONV = (
    Layer("w", (12, 20), "linear"),
    Layer("t", (20, 12), "transposed_linear"),
    Layer("c", (8, 3, 2, 2)),
)
STACK, BIAS, TABLE = Layer("e", (3, 10, 14), "experts"), Layer("b", (12,), "bias"), Layer("n", (9, 5), "embedding")
LAYERS = (WEIGHT, TURNED, CONV, STACK, BIAS, TABLE)
MU, BETAS = 0.95, (0.95, 0.98)


def plan_of(layers: Sequence[Layer] = LAYERS, warmup_steps: int = 0, **settings: Any) -> Plan:
    everything = {"minimum_dimensions": 0, "minimum_numel": 1, "warmup_steps": warmup_steps}
    return Plan.uniform(layers, "identity", wrappers=[Wrap("dion", settings)], seed=5, **everything)


def gradients(rank: int, step: int, layers: Sequence[Layer] = LAYERS) -> Tensors:
    """Standard normal, float64: a part that all ranks share, and one of their own."""
    shared, own = (torch.Generator().manual_seed(1000 * step + seed) for seed in (0, 1 + rank))
    return {
        layer.name: sum(torch.randn(layer.shape, generator=draw, dtype=torch.float64) for draw in (shared, own))
        for layer in layers
    }  # fmt: skip


class Noting(LockstepPlan):
    """Keeps what every group's exchange applies, in the schedule's dense iterations too."""

    def _exchange(self, group: str, steps: Any, bill: Any) -> Any:
        of_ranks, cost = super()._exchange(group, steps, bill)
        self.applied = {**getattr(self, "applied", {}), **of_ranks[0].mean}
        for one in of_ranks:
            assert all(torch.equal(one.mean[name], mean) for name, mean in of_ranks[0].mean.items())
        return of_ranks, cost


# --- the algorithm, slowly ------------------------------------------------------------------------------------------


def gram_schmidt(columns: np.ndarray) -> np.ndarray:
    found: list[np.ndarray] = []
    for column in columns.T:
        for _ in range(2):  # twice is enough
            for other in found:
                column = column - other * (other @ column)
        found.append(column / np.linalg.norm(column))
    return np.stack(found, 1)


class Centralized:
    """Algorithm 1 of one matrix, from a first Q."""

    def __init__(self, q: np.ndarray, shape: tuple[int, int], outputs_first: bool = True, mu: float = MU) -> None:
        self.momentum, self.q, self.mu = np.zeros(shape), q, mu
        self.scale = math.sqrt(shape[0] / shape[1] if outputs_first else shape[1] / shape[0])

    def update(self, gradient: np.ndarray) -> np.ndarray:
        b = self.momentum + gradient
        p = gram_schmidt(b @ self.q)
        r = b.T @ p
        self.momentum = b - (1 - self.mu) * p @ r.T
        self.q = r / np.linalg.norm(r, axis=0)
        return self.scale * p @ self.q.T


class Lion:
    """Of one layer."""

    def __init__(self) -> None:
        self.moment = np.zeros(())

    def update(self, gradient: np.ndarray) -> np.ndarray:
        sign = np.sign(BETAS[0] * self.moment + (1 - BETAS[0]) * gradient)
        self.moment = BETAS[1] * self.moment + (1 - BETAS[1]) * gradient
        return sign


def first_q(layer: Layer, plan: Plan, batch: int | None = None) -> np.ndarray:
    """What all ranks draw: (n, r)."""
    shape = {"w": (3, 20), "t": (3, 12), "c": (2, 12), "e": (3, 3, 14)}[layer.name]
    generator = Context(0, 1, 0, layer.name, plan.seed).random.shared(layer.name, every_iteration=False)
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).numpy()
    return (drawn if batch is None else drawn[batch]).T


class Oracle:
    """The algorithm on the mean gradient of all layers."""

    def __init__(self, plan: Plan) -> None:
        self.matrices = {
            "w": [Centralized(first_q(WEIGHT, plan), (12, 20))],
            "t": [Centralized(first_q(TURNED, plan), (20, 12), outputs_first=False)],
            "c": [Centralized(first_q(CONV, plan), (8, 12))],
            "e": [Centralized(first_q(STACK, plan, expert), (10, 14)) for expert in range(3)],
        }
        self.others = {"b": Lion(), "n": Lion()}

    def update(self, ranks: Sequence[Tensors]) -> dict[str, np.ndarray]:
        found = {}
        for layer in LAYERS:
            mean = np.mean([own[layer.name].numpy() for own in ranks], 0)
            if layer.name in self.others:
                found[layer.name] = self.others[layer.name].update(mean)
            else:
                several = self.matrices[layer.name]
                pieces = mean.reshape(len(several), *several[0].momentum.shape)
                updates = [one.update(piece) for one, piece in zip(several, pieces, strict=True)]
                found[layer.name] = np.stack(updates).reshape(layer.shape)
        return found


@pytest.mark.parametrize(("ranks", "warmup_steps"), [(1, 0), (4, 10)])
def test_ranks_do_what_one_rank_does_with_the_mean_gradient(ranks: int, warmup_steps: int) -> None:
    """30 steps, to rounding, whatever the schedule leaves dense: the updates, and the mean of the ranks' momenta."""
    plan = plan_of(warmup_steps=warmup_steps)
    lockstep, oracle, largest = Noting(plan, ranks), Oracle(plan), 0.0
    for step in range(30):
        of_ranks = [gradients(rank, step) for rank in range(ranks)]
        lockstep.step(step, of_ranks)
        for name, update in oracle.update(of_ranks).items():
            largest = max(largest, float(np.abs(lockstep.applied[name].numpy() - update).max()))
    momenta = [state["w"]["w/velocity"].numpy() for state in lockstep.states]
    gap = np.abs(np.mean(momenta, 0) - oracle.matrices["w"][0].momentum).max()
    print(f"{ranks} ranks, {warmup_steps} dense: updates within {largest:.1e}, mean momentum within {gap:.1e}")
    assert largest < 1e-9
    assert gap < 1e-9
    assert all(not np.allclose(momenta[0], other) for other in momenta[1:])


def test_a_dense_iteration_gives_all_ranks_one_momentum() -> None:
    lockstep = LockstepPlan(plan_of(warmup_steps=3), 3)
    for step in range(3):
        lockstep.step(step, [gradients(rank, step) for rank in range(3)])
    for group, state in lockstep.states[0].items():
        assert all(torch.equal(other[group][key], value) for other in lockstep.states for key, value in state.items())


# --- what its updates are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [WEIGHT, TURNED, CONV], ids=lambda layer: layer.name)
def test_singular_values_of_an_update_are_those_of_its_unit_columns(layer: Layer) -> None:
    """sqrt(outputs / inputs) P Q^T with P^T P = 1 and columns of Q of length 1: ||update||^2 = r times the ratio."""
    lockstep = Noting(plan_of([layer]), 2)
    rows = math.prod(layer.shape) // layer.shape[0]
    scale = math.sqrt(layer.shape[0] / rows) if layer is not TURNED else math.sqrt(rows / layer.shape[0])
    for step in range(5):
        lockstep.step(step, [gradients(rank, step, [layer]) for rank in range(2)])
        update = lockstep.applied[layer.name].reshape(layer.shape[0], -1) / scale
        q = lockstep.states[0][layer.name][f"{layer.name}/q"]
        torch.testing.assert_close(q.norm(dim=1), torch.ones(len(q), dtype=torch.float64))
        values = torch.linalg.svdvals(update)
        torch.testing.assert_close(values[: len(q)], torch.linalg.svdvals(q))
        assert float(values[len(q) :].max()) < 1e-12
        assert float(update.norm()) == pytest.approx(math.sqrt(len(q)))


def test_at_full_rank_a_gradient_that_stands_still_ends_in_its_polar_factor() -> None:
    """With mu = 0 nothing stays in the momentum, and power iteration turns P and Q to the singular vectors: U V^T."""
    draw = torch.Generator().manual_seed(1)
    u, v = (torch.linalg.qr(torch.randn(n, 6, generator=draw, dtype=torch.float64)).Q for n in (6, 9))
    gradient = {"w": u @ torch.diag(2.0 ** -torch.arange(6, dtype=torch.float64)) @ v.T}
    lockstep = Noting(plan_of([Layer("w", (6, 9), "linear")], rank_fraction=1.0, momentum=0.0), 2)
    gaps = []
    for step in range(30):
        lockstep.step(step, [gradient] * 2)
        gaps.append(float((lockstep.applied["w"] - math.sqrt(6 / 9) * u @ v.T).abs().max()))
        assert float(lockstep.states[0]["w"]["w/velocity"].abs().max()) < 1e-14
    print(f"distance from the polar factor: {gaps[0]:.2g}, after 10 steps {gaps[10]:.1e}, at the end {gaps[-1]:.1e}")
    assert gaps[0] > 0.1
    assert gaps[-1] < 1e-12


def test_own_and_velocity_hold_the_input() -> None:
    """own is P P^T B_i; in the mean over ranks M + (1 - mu) own is what there was: B."""
    lockstep = LockstepPlan(plan_of([WEIGHT]), 3)
    for step in range(4):
        done = lockstep.step(step, [gradients(rank, step, [WEIGHT]) for rank in range(3)]).exchanged["w"]
        kept = torch.stack([one.state["w/velocity"] + (1 - MU) * one.own["w"] for one in done]).mean(0)
        torch.testing.assert_close(kept, torch.stack([one.compressor_input["w"] for one in done]).mean(0))
        for one in done:
            assert torch.linalg.matrix_rank(one.own["w"]) == 3


# --- gradients of little rank ---------------------------------------------------------------------------------------


def test_zero_gradients_move_nothing_and_the_next_ones_do() -> None:
    lockstep = Noting(plan_of(), 2)
    nothing = {layer.name: torch.zeros(layer.shape, dtype=torch.float64) for layer in LAYERS}
    for step in range(3):
        lockstep.step(step, [nothing] * 2)
        assert not any(bool(update.any()) for update in lockstep.applied.values())
    lockstep.step(3, [gradients(rank, 3) for rank in range(2)])
    assert all(bool(update.isfinite().all()) and bool(update.any()) for update in lockstep.applied.values())


@pytest.mark.parametrize(
    ("rank", "factor", "fraction"), [(1, 1e-40, 1.0), (2, 1e-30, 0.25), (1, 1.0, 0.25), (2, 1.0, 1.0), (2, 1e33, 1.0)]
)
def test_of_a_gradient_of_low_rank_its_directions_are_applied(rank: int, factor: float, fraction: float) -> None:
    """float32, the gradient of a lower rank than the factors, 3 or 12: no rounding error becomes a direction."""
    draw = torch.Generator().manual_seed(3)
    left, right = torch.randn(12, rank, generator=draw), torch.randn(rank, 20, generator=draw)
    lockstep = Noting(plan_of([WEIGHT, BIAS], rank_fraction=fraction), 2)
    for step in range(40):
        lockstep.step(step, [{"w": left @ right * factor, "b": left[:, 0] * factor}] * 2)
        update = lockstep.applied["w"]
        assert all(bool(one.isfinite().all()) for one in lockstep.applied.values())
        if factor > 1e-38:  # below, float32 has few digits
            outside = update - left @ torch.linalg.lstsq(left, update).solution
            assert float(outside.abs().max()) < 1e-4
            assert float(update.norm()) == pytest.approx(math.sqrt(12 / 20 * rank), rel=1e-3)


def test_rows_that_are_rounding_errors_become_zero() -> None:
    rows = torch.tensor([[3.0, 4.0], [1e-3, 0.0], [1e-7, 1e-7], [0.0, 0.0]])
    assert unit_rows(rows).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert bool(unit_rows(torch.tensor([[torch.nan, 1.0], [1.0, 1.0]]))[0].isnan().any())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.name)
def test_what_is_not_finite_on_one_rank_is_not_on_any(layer: Layer, bad: float) -> None:
    plan = plan_of([layer])
    given = [gradients(rank, 0, [layer]) for rank in range(2)]
    given[1][layer.name].view(-1)[3] = bad
    codec = plan.build(plan.groups[0])
    for dense in (False, True):
        for result in run_lockstep(
            [
                codec.exchange(Batch.of(own, [layer]), {}, Context(rank, 2, 0, "g", dense=dense))
                for rank, own in enumerate(given)
            ]
        ):
            assert not bool(result.value.mean[layer.name].isfinite().all())


# --- bytes and state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fraction", [0.05, 0.25, 0.5, 1.0])
def test_bytes_are_what_is_forecast(fraction: float) -> None:
    """r (m + n) values of a matrix where these are fewer than m n; all of other layers."""
    plan = plan_of(rank_fraction=fraction, warmup_steps=1)
    lockstep = LockstepPlan(plan, 2)
    for step in range(3):
        of_ranks = [{name: grad.float() for name, grad in gradients(rank, step).items()} for rank in range(2)]
        payload = lockstep.step(step, of_ranks).payload
        forecast = plan.payload_bytes(2, compressing=True, states=lockstep.states[0])
        dense = plan.payload_bytes(2, compressing=False) + 4  # the flag of a step in which wrappers act
        assert payload == (forecast if step else dense,) * 2
    if fraction == 0.25:
        values = 3 * 32 + 3 * 32 + 2 * 20 + 3 * 3 * 24 + 12 + 45
        assert plan.payload_bytes(2) == 4 * values + 4
    if fraction == 1.0:
        assert plan.payload_bytes(2) == plan.payload_bytes(2, compressing=False) + 4


def test_state_is_what_it_says_and_a_run_goes_on_from_it_bit_for_bit() -> None:
    plan = plan_of()
    straight, second = Noting(plan, 2), Noting(plan, 2)
    for step in range(6):
        straight.step(step, [gradients(rank, step) for rank in range(2)])
        if step == 2:
            second.states = [
                {group: {key: tensor.clone() for key, tensor in kept.items()} for group, kept in of_rank.items()}
                for of_rank in straight.states
            ]
        if step > 2:
            second.step(step, [gradients(rank, step) for rank in range(2)])
            assert all(torch.equal(second.applied[name], value) for name, value in straight.applied.items())
    for group in plan.groups:
        codec = plan.build(group)
        for rank, of_rank in enumerate(straight.states):
            kept = codec.kept(plan.members(group), rank, 2, group.name)
            assert kept.keys() == of_rank[group.name].keys()
            assert state_problem(kept, of_rank[group.name]) is None
    kept = codec.kept([Layer("w", (12, 20), "linear")], 0, 2, "w")
    assert state_problem(kept, {"w/velocity": torch.zeros(12, 20)}) == "'w/q' is missing"


@pytest.mark.parametrize("policy", ["split", "sum", "drop"])
def test_other_ranks_go_on_with_the_same_mean_momentum(policy: str) -> None:
    """From 3 ranks to 2: dropped, momenta begin anew; all that ranks share stays."""
    plan = plan_of()
    old, new = Noting(plan, 3), Noting(plan, 2)
    for step in range(3):
        old.step(step, [gradients(rank, step) for rank in range(3)])
    for group in plan.groups:
        codec, of_old = plan.build(group), [states[group.name] for states in old.states]
        dealt = [resize(codec, of_old, rank, 2, policy) for rank in range(2)]
        for key, value in of_old[0].items():
            if not key.endswith("/velocity"):
                assert all(torch.equal(one[key], value) for one in dealt)
            elif policy == "drop":
                assert not any(key in one for one in dealt)
            else:
                before = torch.stack([one[key] for one in of_old]).mean(0)
                torch.testing.assert_close(torch.stack([one[key] for one in dealt]).mean(0), before)
        for rank, state in enumerate(dealt):
            new.states[rank][group.name] = state
    common = gradients(0, 3)
    old.step(3, [common] * 3)
    new.step(3, [common] * 2)
    for name, update in new.applied.items():
        same = torch.allclose(update, old.applied[name], atol=1e-9)
        assert same == (policy != "drop" or name in ("b", "n"))


# --- where it belongs -----------------------------------------------------------------------------------------------


def test_it_is_the_optimizer_and_no_other_may_be() -> None:
    plan = method_plan(model(), "Dion", wrapper_settings={"dion": {"rank_fraction": 0.5}})
    assert {wrap.name for group in plan.groups for wrap in group.wrappers} == {"dion"}
    assert wrapper_that(plan, "replaces_optimizer") == "dion"
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


def test_layers_that_a_plan_leaves_out_are_lions() -> None:
    plan = Plan.uniform(LAYERS, "identity", wrappers=[Wrap("dion")])
    assert {name for group in plan.groups for name in group.layers} == {layer.name for layer in LAYERS}
    assert {wrap.name for group in plan.groups for wrap in group.wrappers} == {"dion"}


def test_it_stands_alone_around_identity() -> None:
    with pytest.raises(GradlabError, match="wrapper dion around topk: it sends factors of its own"):
        Dion(TopK())
    with pytest.raises(GradlabError, match="around identity, without a ring"):
        Dion(Identity(Identity.Settings(ring=True)))
    for name, message in {
        "error_feedback": "both add the residual",
        "ef21": "both add the residual",
        "momentum": "both apply momentum",
        "local_momentum": "both apply momentum",
        "onebit_adam": "both apply momentum",
        "two_way": "two_way around dion",
    }.items():
        with pytest.raises(GradlabError, match=message):
            Plan.uniform(LAYERS, "identity", wrappers=[Wrap(name), Wrap("dion")])


def test_shards_are_refused() -> None:
    plan = plan_of([WEIGHT])
    with pytest.raises(GradlabError, match="cannot work on shards, as its wrapper dion orthonormalizes whole matrices"):
        shard_plan(plan, {"w": (6, 20)}, {"w": ""})
    assert isinstance(plan.build(plan.groups[0]), Wrapper)


# --- training -------------------------------------------------------------------------------------------------------

CLASSES, INPUTS = 10, 40


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def batch(rank: int, step: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that a random network tells apart, of inputs whose scales span two decades."""
    draw, fixed = torch.Generator().manual_seed(1000 * step + rank), torch.Generator().manual_seed(7)
    inner, outer = torch.randn(INPUTS, 24, generator=fixed), torch.randn(24, CLASSES, generator=fixed)
    inputs = torch.randn(count, INPUTS, generator=draw)
    labels = (torch.tanh(inputs @ inner / 3) @ outer).argmax(1)
    return inputs * torch.logspace(-1.5, 0.5, INPUTS), labels


def loss_of(net: nn.Module) -> float:
    inputs, labels = batch(99, 10_000, 4000)
    with torch.no_grad():
        return float(nn.functional.cross_entropy(net(inputs), labels))


def trained(rate: float, ranks: int, steps: int, plan: Plan | None = None, momentum: float = 0.0) -> float:
    """The loss after a run of all ranks in lockstep, with a linear decay; without a plan that of the mean gradient."""
    net = model()
    lockstep = Noting(plan, ranks) if plan is not None else None
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum)
    parameters = {layer.name: parameter for layer, parameter in named_layers(net)}
    for step in range(steps):
        of_ranks = []
        for rank in range(ranks):
            net.zero_grad(set_to_none=True)
            inputs, labels = batch(rank, step)
            nn.functional.cross_entropy(net(inputs), labels).backward()
            of_ranks.append({name: p.grad.clone() for name, p in parameters.items() if p.grad is not None})
        if lockstep is not None:
            lockstep.step(step, of_ranks)
        for name, parameter in parameters.items():
            mean = sum(own[name] for own in of_ranks) / ranks
            parameter.grad = mean if lockstep is None else lockstep.applied[name]
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        optimizer.step()
    return loss_of(net)


@pytest.mark.thorough
def test_it_trains_better_than_sgd_with_momentum_at_its_best_rate() -> None:
    """250 steps of 2 ranks at full and half rank, with mu = 0.8 as the run is short; a quarter of the rank trails."""
    sgd = {rate: trained(rate, 2, 250, momentum=0.9) for rate in (0.05, 0.1, 0.2)}
    dion = {}
    for part in (0.25, 0.5, 1.0):
        settings = {"rank_fraction": part, "momentum": 0.8}
        dion[part] = trained(0.05, 2, 250, method_plan(model(), "Dion", wrapper_settings={"dion": settings}))
    print(f"at first {loss_of(model()):.3f}; SGD with momentum, by rate: {sgd}; Dion, by share of the rank: {dion}")
    assert dion[1.0] < dion[0.5] - 0.02
    assert dion[0.5] < min(sgd.values()) - 0.01
    assert dion[0.25] < min(sgd.values()) + 0.1
