"""Weight decay in the gradient and apart from it, against torch.optim.SGD and the authors' update rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import support.wrapper_oracles as oracles
from gradlab.codec import Codec, Context, Tensors, Training, concatenate, exchange_group
from gradlab.codecs.identity import Identity
from gradlab.codecs.topk import TopK
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer
from gradlab.plan import Wrap, method_plan
from gradlab.wrappers.error_feedback import ErrorFeedback
from gradlab.wrappers.local_momentum import LocalMomentum
from gradlab.wrappers.momentum import Momentum
from gradlab.wrappers.momentum_correction import MomentumCorrection
from gradlab.wrappers.two_way import TwoWay
from gradlab.wrappers.weight_decay import WeightDecay
from support.laws import law

RATE, STEPS = 0.1, 6
SHAPES = {"matrix": (6, 5), "vector": (4,)}
LAYERS = (Layer("w", (30, 30), "linear"), Layer("b", (30,), "bias"))
rates, moments = st.sampled_from([1e-3, 0.05, 0.5]), st.sampled_from([0.0, 0.5, 0.9])
worlds, seeds, densities = st.integers(1, 4), st.integers(0, 2**20), st.floats(0.05, 1.0)


def draw(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def flat(tensors: Tensors) -> np.ndarray:
    return concatenate({name: tensors[name] for name in SHAPES}).numpy()


def decayed(codec: Codec, **settings: Any) -> WeightDecay:
    return WeightDecay(codec, WeightDecay.Settings(**settings))


class Run:
    """Ranks that train on drawn gradients."""

    def __init__(self, codec: Codec, ranks: int, seed: int, dense: Sequence[int] = ()) -> None:
        self.codec, self.ranks, self.seed, self.dense = codec, ranks, seed, dense
        self.parameters = draw(seed)
        self.states: list[Tensors] = [{}] * ranks

    def gradients(self, step: int) -> list[Tensors]:
        return [draw(self.seed + 1 + step * self.ranks + rank) for rank in range(self.ranks)]

    def step(self, step: int) -> Tensors:
        """One iteration of all ranks: what is applied, which is the same on all."""
        context = Context(0, self.ranks, step, "group", training=Training(parameters=self.parameters))
        results = run_lockstep(
            [
                exchange_group(self.codec, grads, state, replace(context, rank=rank, dense=step in self.dense))
                for rank, (grads, state) in enumerate(zip(self.gradients(step), self.states, strict=True))
            ]
        )
        means = [result.value.mean for result in results]
        assert all(torch.equal(mean[name], means[0][name]) for mean in means for name in SHAPES)
        self.states = [result.value.state for result in results]
        self.parameters = {name: value - RATE * means[0][name] for name, value in self.parameters.items()}
        return means[0]


@law(worlds, densities, rates, moments, st.booleans(), st.booleans(), seeds, examples=30)
def test_apart_around_momentum_correction_is_the_published_code_of_dgc(
    ranks: int, density: float, rate: float, m: float, nesterov: bool, masking: bool, seed: int
) -> None:
    correction = MomentumCorrection.Settings(momentum=m, nesterov=nesterov, masking=masking)
    inner = MomentumCorrection(TopK(TopK.Settings(density)), correction)
    run = Run(decayed(inner, rate=rate, form="apart", momentum=m, nesterov=nesterov), ranks, seed)
    sender = oracles.DGC.start(ranks, 34, density=density, m=m, nesterov=nesterov, masking=masking)
    optimizer = oracles.DGCSGD(rate, m, nesterov)
    x = flat(run.parameters)
    for step in range(STEPS):
        update = optimizer.update(x, sender.step([flat(grads) for grads in run.gradients(step)]))
        np.testing.assert_allclose(flat(run.step(step)), update, rtol=0, atol=1e-12)
        x = x - RATE * update
    np.testing.assert_allclose(flat(run.parameters), x, rtol=0, atol=1e-12)


@law(worlds, densities, rates, moments, seeds, examples=30)
def test_apart_around_local_momentum_is_the_published_code_of_dist_ef(
    ranks: int, density: float, rate: float, mu: float, seed: int
) -> None:
    follows = {"step_size_ratio": True}
    served = TwoWay(TopK(TopK.Settings(density)), TwoWay.Settings(**follows))
    inner = LocalMomentum(ErrorFeedback(served, ErrorFeedback.Settings(**follows)), LocalMomentum.Settings(mu))
    run = Run(decayed(inner, rate=rate, form="apart", momentum=mu, nesterov=True), ranks, seed)
    server = oracles.ServerSimulation.start(ranks, 34, density, oracles.equal_shards(34, ranks))
    decay, x, velocity = oracles.WeightDecayMomentum(rate, mu), flat(run.parameters), np.zeros((ranks, 34))
    for step in range(STEPS):
        grads = np.stack([flat(grads) for grads in run.gradients(step)])
        velocity = mu * velocity + grads
        update = decay.decompress(x, server.step(list(mu * velocity + grads)))
        np.testing.assert_allclose(flat(run.step(step)), update, rtol=0, atol=1e-12)
        x = x - RATE * update


@law(rates, moments, st.booleans(), st.sampled_from(["gradient", "apart"]), worlds, seeds, examples=30)
def test_without_compression_both_forms_are_torchs(
    rate: float, m: float, nesterov: bool, form: str, ranks: int, seed: int
) -> None:
    """Dense iterations in between included."""
    nesterov = nesterov and m > 0
    own: dict[str, Any] = {"momentum": m, "nesterov": nesterov} if form == "apart" else {}
    inner = Momentum(Identity(), Momentum.Settings(momentum=m, nesterov=nesterov))
    run = Run(decayed(inner, rate=rate, form=form, **own), ranks, seed, dense=(0, 1, 4))
    weights = {name: torch.nn.Parameter(value.clone()) for name, value in run.parameters.items()}
    optimizer = torch.optim.SGD(weights.values(), lr=RATE, momentum=m, nesterov=nesterov, weight_decay=rate)
    for step in range(STEPS):
        grads = run.gradients(step)
        for name, weight in weights.items():
            weight.grad = torch.stack([one[name] for one in grads]).mean(0)
        optimizer.step()
        run.step(step)
    for name, weight in weights.items():
        torch.testing.assert_close(run.parameters[name], weight.detach(), rtol=0, atol=1e-12)


def test_the_forms_differ_where_something_is_compressed() -> None:
    """In the gradient, lambda x is compressed like everything else: only apart does it arrive whole."""
    updates = {}
    for form in ("gradient", "apart"):
        run = Run(decayed(TopK(TopK.Settings(0.1)), rate=0.5, form=form), 2, 3)
        updates[form] = run.step(0)
    assert int((updates["gradient"]["matrix"] != 0).sum()) < 10
    assert bool((updates["apart"]["matrix"] != 0).all())


def test_methods_give_weight_decay_apart_the_momentum_of_gradients() -> None:
    def apart(name: str) -> dict[str, Any]:
        wrap = (
            method_plan(LAYERS, name, momentum=0.8, weight_decay=1e-3, weight_decay_form="apart").groups[0].wrappers[0]
        )
        assert wrap.name == "weight_decay"
        return dict(wrap.settings)

    common = {"rate": 1e-3, "form": "apart"}
    assert apart("DGC") == {**common, "momentum": 0.8, "nesterov": False}
    assert apart("dist-EF-blockSGDM") == {**common, "momentum": 0.8, "nesterov": True}
    assert apart("dist-EF-blockSGD") == common
    assert apart("signum") == common  # as the optimizer would apply it, after the vote


def test_layers_that_stay_dense_get_the_same_form() -> None:
    plan = method_plan(LAYERS, "DGC", weight_decay=1e-3, weight_decay_form="apart")
    (dense,) = [group for group in plan.groups if group.codec == "identity"]
    assert dense.wrappers[0] == Wrap(
        "weight_decay", {"rate": 1e-3, "form": "apart", "momentum": 0.9, "nesterov": False}
    )
    assert [wrap.name for wrap in dense.wrappers] == ["weight_decay", "momentum"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 0.9}, "momentum = 0.9, expected 0 unless form"),
        ({"nesterov": True}, "nesterov = True, expected false unless form"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        WeightDecay.Settings(**settings)
