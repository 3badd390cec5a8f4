"""GradiVeQ's compressor as an estimator: scikit-learn's own checks, the codec, and the mathematics of projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import check_estimator

from gradlab.analysis.fit.sklearn_estimator import GradientPCA
from gradlab.codec import Context, exchange_group
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.collectives import run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer, flatten, split_slices
from gradlab.learning.slice_pca import dimension, principal_axes
from support.laws import law
from support.recorded import CONVOLUTION, random_gradients, record

LEAST_CHECKS = 40  # scikit-learn 1.9 has 47


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def planted(seed: int, count: int, size: int, rank: int, noise: float = 1e-3) -> np.ndarray:
    """Samples (count, size) about a mean, in a subspace of that rank but for some noise."""
    directions = normal(1000, rank, size)
    return 1.0 + normal(seed, count, rank) @ directions + noise * normal(seed + 1, count, size)


@pytest.mark.parametrize("estimator", [GradientPCA(), GradientPCA(2, whitening=False)])
def test_scikit_learns_checks_all_pass(estimator: GradientPCA) -> None:
    results = check_estimator(estimator, on_skip=None, on_fail=None)
    failed = {result["check_name"]: repr(result["exception"]) for result in results if result["status"] == "failed"}
    assert failed == {}
    # That one asks for a setting of the whole process; it is of no concern to estimators that take numpy arrays.
    skipped = {result["check_name"] for result in results if result["status"] == "skipped"}
    assert skipped <= {"check_array_api_input"}
    passed = [result for result in results if result["status"] == "passed"]
    assert len(passed) == len(results) - len(skipped)
    assert len(passed) >= LEAST_CHECKS


# --- the codec ------------------------------------------------------------------------------------------------------


def recorded_slices(path: Path, size: int) -> np.ndarray:
    """The first slice of a recorded convolution's mean gradients, in GradiVeQ's order: (steps, size), float32."""
    with record(path, random_gradients(0, steps=30, ranks=2)) as trace:
        means = [np.mean([of_rank[CONVOLUTION.name] for of_rank in step.gradients], axis=0) for step in trace.iterate()]
    first = [split_slices(flatten(torch.from_numpy(mean), "gradiveq"), size)[0][0] for mean in means]
    return torch.stack(first).numpy()


@pytest.mark.parametrize("whitening", [True, False])
@pytest.mark.parametrize(
    ("ours", "codecs"), [({"loss_threshold": 0.2}, {"loss_threshold": 0.2}), ({"n_components": 5}, {"ratio": 24 / 5})]
)
def test_it_is_the_codec_bit_for_bit(
    tmp_path: Path, whitening: bool, ours: dict[str, Any], codecs: dict[str, Any]
) -> None:
    """On a recorded layer: the same basis and mean, and slices that come out as a rank's own exchange leaves them."""
    samples = recorded_slices(tmp_path / "trace", 24)
    fitted, later = samples[:20], samples[20:]
    estimator = GradientPCA(**ours, whitening=whitening).fit(fitted)
    codec = GradiVeQ(GradiVeQ.Settings(**codecs, slice_size=24, whitening=whitening)).fit(
        [Layer("w", (24,))], {"w": torch.from_numpy(fitted)}
    )
    basis = codec.learned["w/basis"]
    assert estimator.components_.dtype == np.float32
    assert 1 < estimator.n_components_ == basis.shape[2] < 20
    assert np.array_equal(estimator.components_, basis[0].T.numpy())
    assert np.array_equal(estimator.mean_, codec.learned["w/mean"][0].numpy() if whitening else np.zeros(24))
    for grad in later:
        (result,) = run_lockstep([exchange_group(codec, {"w": torch.from_numpy(grad)}, {}, Context(0, 1, 0))])
        restored = estimator.inverse_transform(estimator.transform(grad[None]))[0]
        np.testing.assert_allclose(restored, result.value.own["w"].numpy(), rtol=1e-6, atol=1e-6)


@law(st.integers(-900, 900), st.booleans(), st.booleans(), examples=40)
def test_a_scale_of_two_to_the_k_changes_nothing_but_the_scale(k: int, double: bool, whitening: bool) -> None:
    """Even where squares are no numbers any more."""
    samples = (normal(0, 20, 3) @ normal(1, 3, 8)).astype(np.float64 if double else np.float32)
    scaled = np.ldexp(samples, k if double else k // 9)
    one, other = (GradientPCA(loss_threshold=0.1, whitening=whitening).fit(x) for x in (samples, scaled))
    assert np.array_equal(one.components_, other.components_)
    assert np.array_equal(np.ldexp(one.mean_, k if double else k // 9), other.mean_)
    assert other.loss(scaled) == pytest.approx(one.loss(samples), rel=1e-4)


@law(st.integers(2, 30), st.integers(1, 20), st.floats(0, 0.99), st.integers(0, 99), examples=50)
def test_it_is_slice_pca(count: int, size: int, loss_threshold: float, seed: int) -> None:
    samples = normal(seed, count, size) * np.linspace(1, 2, size) + 3
    fitted = GradientPCA(loss_threshold=loss_threshold).fit(samples)
    values, axes = principal_axes(torch.from_numpy(samples - samples.mean(0)))
    d = dimension(values, loss_threshold)
    assert fitted.n_components_ == d
    assert np.array_equal(fitted.components_, axes[:, :d].T.numpy())
    assert np.array_equal(fitted.explained_variance_, values[:d].numpy())
    np.testing.assert_allclose(fitted.explained_variance_, np.square(fitted.transform(samples)).mean(0), rtol=1e-6)


# --- projections ----------------------------------------------------------------------------------------------------

sizes = (st.integers(2, 20), st.integers(1, 15), st.integers(1, 20), st.booleans(), st.integers(0, 99))


@law(*sizes)
def test_there_and_back_is_the_orthogonal_projection(
    count: int, size: int, kept: int, whitening: bool, seed: int
) -> None:
    """On what the components span, about the mean: the nearest point there, found by least squares."""
    fitted = GradientPCA(kept, whitening=whitening).fit(2.0 + normal(seed, count, size))
    x = 5 * normal(seed + 100, 7, size)
    projected = fitted.inverse_transform(fitted.transform(x))
    codes = np.linalg.lstsq(fitted.components_.T, (x - fitted.mean_).T, rcond=None)[0]
    np.testing.assert_allclose(projected, codes.T @ fitted.components_ + fitted.mean_, atol=1e-6)
    np.testing.assert_allclose((x - projected) @ fitted.components_.T, 0, atol=1e-6)
    np.testing.assert_allclose(fitted.inverse_transform(fitted.transform(projected)), projected, atol=1e-6)
    assert fitted.loss(x) == pytest.approx(np.square(projected - x).sum() / np.square(x).sum(), rel=1e-12)
    assert fitted.score(x) == 1 - fitted.loss(x)


@law(*sizes)
def test_components_are_orthonormal_and_their_signs_fixed(
    count: int, size: int, kept: int, whitening: bool, seed: int
) -> None:
    samples = normal(seed, count, size)
    fitted = GradientPCA(kept, whitening=whitening).fit(samples)
    d = fitted.n_components_
    assert d == min(kept, size, count - whitening)
    assert fitted.components_.shape == (d, size)
    np.testing.assert_allclose(fitted.components_ @ fitted.components_.T, np.eye(d), atol=1e-6)
    assert (fitted.components_[np.arange(d), np.abs(fitted.components_).argmax(1)] > 0).all()
    assert (np.diff(fitted.explained_variance_) <= 0).all()
    again = clone(fitted).fit(samples)
    assert np.array_equal(again.components_, fitted.components_)


def test_d_by_equation_6_finds_a_planted_rank() -> None:
    samples = planted(0, 100, 24, rank=4)
    fitted = GradientPCA().fit(samples[:60])
    assert fitted.n_components_ == 4
    assert fitted.loss(samples[60:]) < 1e-5
    assert list(fitted.get_feature_names_out()) == [f"gradientpca{n}" for n in range(4)]


@pytest.mark.parametrize("value", [0.0, 3.5])
def test_samples_that_never_change_are_their_mean(value: float) -> None:
    fitted = GradientPCA(3).fit(np.full((6, 4), value))
    assert fitted.components_.tolist() == [[1, 0, 0, 0]]
    assert fitted.explained_variance_.tolist() == [0]
    assert fitted.loss(np.full((2, 4), value)) == 0


# --- among other estimators -----------------------------------------------------------------------------------------


def test_in_a_pipeline_it_keeps_what_a_regression_needs() -> None:
    samples = planted(0, 80, 24, rank=4)
    target = (samples - 1) @ np.linalg.pinv(normal(1000, 4, 24)) @ np.array([1.0, -2.0, 3.0, 0.5])
    pipeline = make_pipeline(GradientPCA(), LinearRegression()).fit(samples[:50], target[:50])
    assert pipeline.score(samples[50:], target[50:]) > 0.999
    few = pipeline.set_params(gradientpca__n_components=1).fit(samples[:50], target[:50])
    assert few.score(samples[50:], target[50:]) < 0.99


def test_a_grid_search_takes_what_loses_least_later() -> None:
    samples = planted(0, 60, 24, rank=4)
    search = GridSearchCV(GradientPCA(), {"n_components": [1, 2, 4], "whitening": [False, True]}, cv=TimeSeriesSplit(3))
    search.fit(samples)
    assert search.best_params_["n_components"] == 4
    results = search.cv_results_
    assert np.isfinite(results["mean_test_score"]).all()
    ((fit, later), *_) = TimeSeriesSplit(3).split(samples)
    expected = [1 - GradientPCA(**setting).fit(samples[fit]).loss(samples[later]) for setting in results["params"]]
    np.testing.assert_array_equal(results["split0_test_score"], expected)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [{"n_components": 0}, {"n_components": 2.5}, {"n_components": True}, {"loss_threshold": 1.0}]
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    (name,) = setting
    with pytest.raises(GradlabError, match=f"GradientPCA: {name} = "):
        GradientPCA(**setting).fit(normal(0, 5, 4))


def test_what_cannot_be_used_is_refused() -> None:
    fitted = GradientPCA(2).fit(normal(0, 5, 4))
    with pytest.raises(GradlabError, match="codes of 3 values, expected d = 2"):
        fitted.inverse_transform(normal(0, 5, 3))
    with pytest.raises(ValueError, match="expecting 4 features"):
        fitted.transform(normal(0, 5, 3))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        GradientPCA().fit(normal(0, 1, 4))
    with pytest.raises(NotFittedError):
        GradientPCA().loss(normal(0, 5, 4))
