"""Synthetic gradients: covariance, correlation and drift are the stated ones."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from support import synthetic

MODEL = synthetic.GradientModel(
    numel=40, eigenvalues=(9.0, 4.0, 1.0), noise_std=(0.5, 1.0, 0.25), shared=0.6, drift=0.02
)
STEPS = 4000


@st.composite
def gradient_models(draw: st.DrawFn) -> synthetic.GradientModel:
    eigenvalues = tuple(sorted(draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=4)), reverse=True))
    return synthetic.GradientModel(
        numel=2 * len(eigenvalues) + draw(st.integers(0, 20)),
        eigenvalues=eigenvalues,
        noise_std=tuple(draw(st.lists(st.floats(0, 2), min_size=1, max_size=4))),
        shared=draw(st.floats(0, 1)),
        drift=draw(st.floats(0, 0.1)),
    )


def _covariance(model: synthetic.GradientModel, basis: np.ndarray, first: int, second: int) -> np.ndarray:
    """The docstring's covariance between two nodes at one step, written out."""
    signal = basis @ np.diag(model.eigenvalues) @ basis.T
    if first != second:
        return model.shared * signal
    return signal + model.noise_std[first] ** 2 * np.eye(model.numel)


def _z_scores(x: np.ndarray, y: np.ndarray, truth: np.ndarray, xx: np.ndarray, yy: np.ndarray) -> np.ndarray:
    """Errors of the empirical covariance (steps, numel)' (steps, numel) in its Gaussian standard errors."""
    error = x.T @ y / len(x) - truth
    return error / np.sqrt((np.outer(np.diag(xx), np.diag(yy)) + truth * truth.T) / len(x))


@pytest.mark.parametrize(("first", "second", "seed"), [(0, 0, 0), (2, 1, 1)])
def test_the_empirical_covariance_is_the_stated_one(first: int, second: int, seed: int) -> None:
    model = dataclasses.replace(MODEL, drift=0.0)
    drawn = synthetic.draw(model, STEPS, np.random.default_rng(seed))
    x, y = drawn.values[:, first].astype(float), drawn.values[:, second].astype(float)
    truth, xx, yy = (
        _covariance(model, drawn.basis(0), *pair) for pair in ((first, second), (first,) * 2, (second,) * 2)
    )
    scores = _z_scores(x, y, truth, xx, yy)
    assert np.abs(scores).max() < 5.5  # 1600 correlated values: the largest of as many normal ones is about 3.5
    assert 0.7 < np.sqrt(np.mean(scores**2)) < 1.3


def test_nodes_at_different_steps_are_unrelated() -> None:
    model = dataclasses.replace(MODEL, drift=0.0)
    drawn = synthetic.draw(model, STEPS, np.random.default_rng(2))
    covariances = [_covariance(model, drawn.basis(0), node, node) for node in (0, 1)]
    x, y = drawn.values[:-1, 0].astype(float), drawn.values[1:, 1].astype(float)
    assert np.abs(_z_scores(x, y, np.zeros((40, 40)), *covariances)).max() < 5.5


def test_the_cosine_between_nodes_is_the_stated_one_under_drift() -> None:
    values = synthetic.draw(MODEL, STEPS, np.random.default_rng(0)).values.astype(float)
    products = np.einsum("tmi,tni->mn", values, values) / STEPS
    lengths = np.sqrt(np.diag(products))
    assert np.diag(products) == pytest.approx(synthetic.expected_energy(MODEL), rel=0.06)
    assert np.abs(products / np.outer(lengths, lengths) - synthetic.expected_cosine(MODEL)).max() < 0.03


@pytest.mark.parametrize(("kept", "age"), [(1, 0), (3, 40)])
def test_a_basis_loses_with_age_what_is_stated(kept: int, age: int) -> None:
    drawn = synthetic.draw(MODEL, STEPS, np.random.default_rng(3))
    lost = total = 0.0
    for step in range(age, STEPS):
        gradient = drawn.values[step, 1].astype(float)
        energy, coefficients = gradient @ gradient, drawn.basis(step - age)[:, :kept].T @ gradient
        lost, total = lost + energy - coefficients @ coefficients, total + energy
    assert lost / total == pytest.approx(synthetic.expected_tail_energy(MODEL, kept, age, node=1), abs=0.015)


@settings(max_examples=40, deadline=None)
@given(model=gradient_models(), seed=st.integers(0, 2**32), step=st.integers(0, 30), age=st.integers(0, 15))
def test_the_directions_stay_orthonormal_and_turn_by_the_stated_angle(
    model: synthetic.GradientModel, seed: int, step: int, age: int
) -> None:
    drawn = synthetic.draw(model, 1, np.random.default_rng(seed))
    now, before = drawn.basis(step + age), drawn.basis(step)
    assert np.allclose(now.T @ now, np.eye(model.rank), atol=1e-10)
    turned = model.drift * age
    assert np.allclose(subspace_angles(now, before), min(turned, np.pi - turned), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(model=gradient_models(), seed=st.integers(0, 2**32), age=st.integers(0, 40), data=st.data())
def test_every_formula_follows_from_the_covariance(
    model: synthetic.GradientModel, seed: int, age: int, data: st.DataObject
) -> None:
    drawn = synthetic.draw(model, 1, np.random.default_rng(seed))
    node, other = (data.draw(st.integers(0, model.nodes - 1)) for _ in range(2))
    now, own = drawn.basis(age), _covariance(model, drawn.basis(age), node, node)
    kept = data.draw(st.integers(0, model.rank))
    stale = drawn.basis(0)[:, :kept]
    assert np.allclose(np.linalg.eigvalsh(own)[::-1], synthetic.expected_spectrum(model, node), atol=1e-9)
    assert synthetic.expected_energy(model)[node] == pytest.approx(np.trace(own))
    lost = 1 - np.trace(stale.T @ own @ stale) / np.trace(own)
    assert synthetic.expected_tail_energy(model, kept, age, node) == pytest.approx(lost, abs=1e-9)
    pairs = [[_covariance(model, now, m, n) for n in range(model.nodes)] for m in range(model.nodes)]
    cosine = np.trace(pairs[node][other]) / np.sqrt(np.trace(own) * np.trace(pairs[other][other]))
    assert synthetic.expected_cosine(model)[node, other] == pytest.approx(cosine)


def test_a_draw_follows_from_its_generator() -> None:
    first, again, other = (synthetic.draw(MODEL, 3, np.random.default_rng(seed)).values for seed in (0, 0, 1))
    assert first.dtype == np.float32
    assert first.shape == (3, 3, 40)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
