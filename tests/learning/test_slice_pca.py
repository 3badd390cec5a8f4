"""PCA of slices against explicit loops over GradiVeQ's equations and against scikit-learn's PCA."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from sklearn.decomposition import PCA as SklearnPCA

from gradlab.codec import Context, Tensors, exchange_group
from gradlab.codec.measures import contribution_error
from gradlab.codecs.gradiveq import GradiVeQ
from gradlab.collectives import LockstepResult, run_lockstep
from gradlab.errors import GradlabError
from gradlab.layout import Layer, flatten, unflatten
from gradlab.learning.slice_pca import default_slice_size, dimension, principal_axes
from support.laws import law


def fit_bases(samples: torch.Tensor, mean: torch.Tensor, loss_threshold: float) -> torch.Tensor:
    """(B, K, d) from samples (T, B, K) of slices that each have a basis, and their mean (B, K)."""
    return GradiVeQ(GradiVeQ.Settings(loss_threshold, reuse=1)).bases(samples, mean, samples.shape[1])["basis"]


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exchange(codec: GradiVeQ, grads: list[Tensors]) -> list[LockstepResult]:
    return run_lockstep([exchange_group(codec, g, {}, Context(rank, len(grads), 0)) for rank, g in enumerate(grads)])


def explicit(vector: np.ndarray, basis: np.ndarray, mean: np.ndarray, reuse: int | None) -> np.ndarray:
    """Eqs. (3) and (5), slice by slice: what a gradient (numel,) becomes; the tail that fills no slice stays."""
    result, size = vector.copy(), basis.shape[1]
    for m in range(len(vector) // size):
        u = basis[m // (reuse or len(vector))]
        code = u.T @ (vector[m * size : (m + 1) * size] - mean[m])
        result[m * size : (m + 1) * size] = u @ code + mean[m]
    return result


conv_shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
cases = (conv_shapes, st.integers(2, 12), st.sampled_from([None, 1, 2, 3]), st.integers(1, 4), st.integers(0, 99))


def fitted(shape: tuple[int, ...], slice_size: int, reuse: int | None, seed: int, loss: float = 0.2) -> GradiVeQ:
    settings = GradiVeQ.Settings(loss, slice_size=slice_size, reuse=reuse)
    return GradiVeQ(settings).fit([Layer("w", shape)], {"w": normal(seed, 9, *shape)})


@law(*cases)
def test_exchange_is_equations_3_to_5(
    shape: tuple[int, ...], slice_size: int, reuse: int | None, ranks: int, seed: int
) -> None:
    """With the paper's sums g = sum g_n and mu = N mean, the mean is (U sum_n U^T (g_n - mu/N) + mu) / N."""
    assume(np.prod(shape) >= slice_size)
    codec = fitted(shape, slice_size, reuse, seed)
    axes, mean = codec.learned["w/basis"].double().numpy(), codec.learned["w/mean"].double().numpy()
    grads = [normal(1000 + seed + rank, *shape) for rank in range(ranks)]
    vectors = [flatten(grad, "gradiveq").numpy() for grad in grads]
    size = axes.shape[1]
    total = sum(vectors)
    for m in range(len(total) // size):
        u = axes[m // (reuse or len(total))]
        part = slice(m * size, (m + 1) * size)
        mu = ranks * mean[m]
        total[part] = u @ sum(u.T @ (vector[part] - mu / ranks) for vector in vectors) + mu
    results = exchange(codec, [{"w": grad} for grad in grads])
    whole, width = len(total) // size, axes.shape[2]
    for vector, result in zip(vectors, results, strict=True):
        np.testing.assert_allclose(flatten(result.value.mean["w"], "gradiveq").numpy(), total / ranks, atol=1e-12)
        own = flatten(result.value.own["w"], "gradiveq").numpy()
        np.testing.assert_allclose(own, explicit(vector, axes, mean, reuse), atol=1e-12)
        assert result.payload_bytes == 8 * (whole * width + len(vector) - whole * size)


@law(*cases)
def test_compression_commutes_with_aggregation(
    shape: tuple[int, ...], slice_size: int, reuse: int | None, ranks: int, seed: int
) -> None:
    """Eq. (1): aggregating compressed gradients is compressing the aggregate."""
    codec = fitted(shape, slice_size, reuse, seed)
    grads = [normal(1000 + seed + rank, *shape) for rank in range(ranks)]
    together = exchange(codec, [{"w": grad} for grad in grads])
    (alone,) = exchange(codec, [{"w": sum(grads) / ranks}])
    for result in together:
        torch.testing.assert_close(result.value.mean["w"], alone.value.own["w"], atol=1e-12, rtol=1e-12)


def test_the_error_of_a_contribution_is_equation_7() -> None:
    codec = fitted((4, 3, 3, 3), 12, None, 0)
    grad = normal(5, 4, 3, 3, 3)
    (result,) = exchange(codec, [{"w": grad}])
    done = type(result.value)(result.value.mean, result.value.own, compressor_input={"w": grad})
    vector = flatten(grad, "gradiveq").numpy()
    left = explicit(vector, codec.learned["w/basis"].double().numpy(), codec.learned["w/mean"].double().numpy(), None)
    error, norm = contribution_error(done)["w"]
    assert error == pytest.approx(float(np.sum((vector - left) ** 2)), rel=1e-12)
    assert norm == pytest.approx(float(np.sum(vector**2)), rel=1e-12)


# --- fitting --------------------------------------------------------------------------------------------------------


@law(st.integers(2, 30), st.integers(1, 20), st.integers(0, 99))
def test_axes_are_scikit_learns(count: int, features: int, seed: int) -> None:
    """Fewer samples than features and more: same eigenvalues, same axes up to sign."""
    samples = normal(seed, count, features) * torch.linspace(1, 2, features, dtype=torch.float64)
    values, axes = principal_axes(samples - samples.mean(0))
    oracle = SklearnPCA(svd_solver="full").fit(samples.numpy())
    kept = min(features, count - 1)
    assert axes.shape == (features, kept)
    np.testing.assert_allclose(
        values.numpy(), oracle.explained_variance_[:kept] * (count - 1) / count, rtol=1e-7, atol=1e-12
    )
    torch.testing.assert_close(axes.T @ axes, torch.eye(kept, dtype=torch.float64), atol=1e-6, rtol=0)
    # Axes of near-equal eigenvalues may mix: compare the operator sum_k s_k u_k u_k^T, which is unique.
    ours = (axes * values) @ axes.T
    components, variance = oracle.components_[:kept], oracle.explained_variance_[:kept] * (count - 1) / count
    np.testing.assert_allclose(ours.numpy(), (components.T * variance) @ components, atol=1e-9)


def test_axes_match_one_by_one_where_eigenvalues_are_apart() -> None:
    scales = 2.0 ** -torch.arange(8, dtype=torch.float64)
    for count in (5, 300):
        samples = normal(count, count, 8) * scales
        _, axes = principal_axes(samples - samples.mean(0))
        components = SklearnPCA(svd_solver="full").fit(samples.numpy()).components_[: axes.shape[1]]
        np.testing.assert_allclose(np.abs((components * axes.T.numpy()).sum(1)), 1.0, atol=1e-9)
        assert bool((axes.gather(0, axes.abs().argmax(0, keepdim=True)) > 0).all())


@law(st.lists(st.floats(0, 1e3), min_size=1, max_size=12), st.floats(0, 0.999))
def test_d_is_the_fewest_by_equation_6(eigenvalues: list[float], loss_threshold: float) -> None:
    ordered = sorted(eigenvalues, reverse=True)
    total = sum(ordered)
    assume(total > 1e-3)
    shares = [sum(ordered[:d]) / total for d in range(1, len(ordered) + 1)]
    assume(all(abs(share - (1 - loss_threshold)) > 1e-9 for share in shares))
    explicit_d = next(d for d, share in enumerate(shares, 1) if share > 1 - loss_threshold)
    assert dimension(torch.tensor(ordered, dtype=torch.float64), loss_threshold) == explicit_d


def test_d_at_the_ends() -> None:
    """No loss allowed: every axis. The inequality is strict. Without variance: one."""
    assert dimension(torch.tensor([4.0, 3.0, 1.0]), 0.0) == 3
    assert dimension(torch.tensor([2.0, 1.0, 1.0]), 0.5) == 2
    assert dimension(torch.zeros(4), 0.1) == 1
    assert dimension(torch.zeros(0), 0.1) == 1


@pytest.mark.parametrize("planted", [1, 3, 6])
@pytest.mark.parametrize("count", [15, 400])
def test_a_planted_rank_is_found(planted: int, count: int) -> None:
    """Gradients in a planted subspace, fewer samples than K = 24 and more: d is its dimension, the axes span it."""
    directions = torch.linalg.qr(normal(1, 24, planted)).Q
    samples = normal(2, count, planted) @ directions.T + 1e-5 * normal(3, count, 24)
    layer = Layer("w", (4, 6))
    codec = GradiVeQ(GradiVeQ.Settings(0.001)).fit(
        [layer], {"w": torch.stack([unflatten(s, (4, 6), "gradiveq") for s in samples])}
    )
    basis = codec.learned["w/basis"].double()
    assert basis.shape == (1, 24, planted)
    torch.testing.assert_close(basis[0] @ (basis[0].T @ directions), directions, atol=1e-4, rtol=0)


@law(st.floats(0.001, 0.9), st.integers(2, 30), st.integers(0, 99), examples=50)
def test_the_loss_on_the_fitted_samples_keeps_the_threshold(loss_threshold: float, count: int, seed: int) -> None:
    """Section 3: the chosen d guarantees a loss of at most lambda of the variance of the samples of each slice."""
    slices = normal(seed, count, 3, 10)
    mean = slices.mean(0)
    basis = fit_bases(slices, mean, loss_threshold)
    for m in range(3):
        centred = slices[:, m] - mean[m].double()
        u = basis[m].double()
        lost = (centred - centred @ u @ u.T).square().sum()
        assert float(lost) <= loss_threshold * float(centred.square().sum()) + 1e-5


def test_one_basis_for_all_slices_comes_from_the_first() -> None:
    slices = normal(0, 50, 4, 12)
    layer = Layer("w", (48,))
    fits = [
        GradiVeQ(GradiVeQ.Settings(0.3, 12, reuse)).fit([layer], {"w": slices.reshape(50, 48)})
        for reuse in (None, 1, 3)
    ]
    one, each, chosen = (fit.learned["w/basis"] for fit in fits)
    assert all(torch.equal(fit.learned["w/mean"], slices.mean(0).float()) for fit in fits)
    assert (len(one), len(each), len(chosen)) == (1, 4, 2)
    shared = min(each.shape[2], chosen.shape[2])
    assert torch.equal(chosen[:, :, :shared], each[[0, 3], :, :shared])
    _, axes = principal_axes(slices[:, 0] - slices[:, 0].mean(0))
    torch.testing.assert_close(one[0], axes[:, : one.shape[2]].float())
    torch.testing.assert_close(each[0, :, : one.shape[2]], one[0])


@pytest.mark.parametrize("value", [0.0, 3.5])
@pytest.mark.parametrize("reuse", [None, 1, 2])
def test_samples_that_never_change_are_their_mean(value: float, reuse: int | None) -> None:
    """Constant and all-zero slices: finite orthonormal axes, and the constant comes back."""
    constant = torch.full((6, 4, 3, 2, 2), value)
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=12, reuse=reuse)).fit([Layer("w", (4, 3, 2, 2))], {"w": constant})
    axes = codec.learned["w/basis"]
    torch.testing.assert_close(axes.mT @ axes, torch.eye(axes.shape[2]).expand(len(axes), -1, -1))
    (result,) = exchange(codec, [{"w": constant[0]}])
    torch.testing.assert_close(result.value.mean["w"], constant[0])


def test_slices_without_variance_beside_others() -> None:
    """Per-slice bases have one width: a dead slice's is completed to orthonormal columns."""
    slices = normal(0, 20, 3, 8)
    slices[:, 1] = 0.0
    slices[:, 2, 1:] = 2.0
    basis = fit_bases(slices, slices.mean(0), 0.05)
    width = basis.shape[2]
    assert width > 1
    torch.testing.assert_close(basis.mT @ basis, torch.eye(width).expand(3, -1, -1), atol=1e-5, rtol=0)
    torch.testing.assert_close(basis[2, :, 0].abs(), torch.eye(8)[0])


def test_all_axes_lose_nothing() -> None:
    """lambda = 0 with more samples than K spans the space: any gradient comes back, tail and all."""
    codec = GradiVeQ(GradiVeQ.Settings(0.0, slice_size=10)).fit(
        [Layer("w", (4, 3, 2, 2))], {"w": normal(0, 40, 4, 3, 2, 2)}
    )
    grad = normal(7, 4, 3, 2, 2)
    (result,) = exchange(codec, [{"w": grad}])
    torch.testing.assert_close(result.value.mean["w"], grad, atol=1e-5, rtol=0)


def test_a_layer_smaller_than_a_slice_goes_dense() -> None:
    layers = [Layer("big", (8, 4)), Layer("small", (3,))]
    samples = {"big": normal(0, 9, 8, 4), "small": normal(1, 9, 3)}
    codec = GradiVeQ(GradiVeQ.Settings(slice_size=16)).fit(layers, samples)
    assert set(codec.learned) == {"big/basis", "big/mean", "big/width"}
    codec.check(layers)
    grads = [{"big": normal(2 + r, 8, 4), "small": normal(4 + r, 3)} for r in range(2)]
    results = exchange(codec, grads)
    torch.testing.assert_close(results[0].value.mean["small"], (grads[0]["small"] + grads[1]["small"]) / 2)
    assert codec.forecast(layers, 2, {}).payload == results[0].payload_bytes / 2


def test_the_papers_slice_size() -> None:
    """Section 3: K = 768 = 3 x 16 x 16 for a (3, 3, 16, 16) layer; a multiple of F D that divides the layer."""
    assert default_slice_size(Layer("w", (16, 16, 3, 3))) == 768
    assert default_slice_size(Layer("w", (8, 4, 3, 3))) == 288
    assert default_slice_size(Layer("w", (64, 64, 3, 3))) == 4096
    assert default_slice_size(Layer("w", (10, 64))) == 640
    assert default_slice_size(Layer("w", (65,))) == 65
    assert default_slice_size(Layer("w", ())) == default_slice_size(Layer("w", (0, 4))) == 1


# --- bad input ------------------------------------------------------------------------------------------------------

LAYER = Layer("w", (4, 3, 2, 2))


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"w": torch.zeros(1, 4, 3, 2, 2)}, "w: 1 samples, PCA needs at least 2"),
        ({"w": torch.zeros(5, 4, 3, 2, 3)}, r"w: samples of shape \[5, 4, 3, 2, 3\], expected"),
        ({"w": torch.zeros(())}, r"w: samples of shape \[\], expected"),
        ({"w": torch.full((5, 4, 3, 2, 2), torch.nan)}, "w: samples with NaN or infinity"),
        ({"v": torch.zeros(5, 4, 3, 2, 2)}, "w: no samples to fit PCA on; there are some of: v"),
    ],
)
def test_samples_that_cannot_be_fitted_are_refused(samples: Tensors, message: str) -> None:
    with pytest.raises(GradlabError, match=message):
        GradiVeQ().fit([LAYER], samples)


GOOD = {"w/basis": torch.eye(12)[None, :, :3], "w/mean": torch.zeros(4, 12)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w/basis": None}, "expected a basis and a mean, or neither"),
        ({"w/basis": torch.zeros(12, 3)}, "got a basis"),
        ({"w/basis": torch.zeros(1, 12, 13)}, "got a basis"),
        ({"w/basis": torch.zeros(1, 12, 0)}, "got a basis"),
        ({"w/basis": torch.zeros(3, 12, 3)}, "got a basis"),
        ({"w/basis": torch.zeros(1, 49, 3), "w/mean": torch.zeros(0, 49)}, "got a basis"),
        ({"w/mean": torch.zeros(3, 12)}, "got a basis"),
        ({"w/mean": torch.full((4, 12), torch.nan)}, "non-finite"),
        ({"w/basis": torch.full((1, 12, 3), torch.inf)}, "non-finite"),
        ({"w/mean": torch.zeros(4, 12, dtype=torch.int64)}, "expected float32"),
        ({"w/basis": torch.zeros(1, 12, 3).to(torch.float8_e4m3fn)}, "expected float32"),
        ({"v/basis": torch.zeros(1, 12, 3)}, "belong to no layer"),
        ({"w/other": torch.zeros(3)}, "belong to no layer"),
    ],
)
def test_learned_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor | None], message: str) -> None:
    GradiVeQ(learned=GOOD).check([LAYER])
    learned = {key: value for key, value in (GOOD | change).items() if value is not None}
    with pytest.raises(GradlabError, match=message):
        GradiVeQ(learned=learned).check([LAYER])
