"""Gradient noise scale, and how redundant ranks' gradients become with larger batches and more ranks.

McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training" (2018), section 2.2 and appendix A.1: a
gradient of batch b is the true one plus noise of covariance Sigma / b. At the batch B = tr(Sigma) / ||G||^2, in
examples, signal and noise are equal. Ranks that compute batches of b have a cosine of 1 / (1 + B / b) between them.
B >> b means that ranks share next to nothing: no code can save much by coding what is common, the mean over N ranks
makes the gradient, and compression error is one more noise. B << N b means that more ranks buy little.

All of it follows from inner products between ranks (T, N, N), which add up exactly over layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gradlab.analysis.intervals import SeriesMean, mean_interval
from gradlab.analysis.measure.information import gaussian_information
from gradlab.errors import GradlabError
from gradlab.jsonable import Jsonable

_SPLITS = 32  # of the ranks into two groups, drawn
_BATCH_FACTORS = tuple(2.0**k for k in range(-4, 11))
_RANK_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class NoiseScale(Jsonable):
    """B in batches of one rank, with its interval; infinity where no signal is found.

    signal: ||G||^2, noise: tr(Sigma) of one rank's batch, means over iterations.
    low, high: None if there is no interval; `refused` says why.
    drift: the share of signal at the start and end of the fitted line, if it drifts, as in `SeriesMean`.
    """

    batches: float
    low: float | None
    high: float | None
    level: float
    signal: float
    noise: float
    refused: str
    drift: tuple[float, float] | None


@dataclass(frozen=True)
class LayerNoise(NoiseScale):
    """The noise scale of the layer of this name."""

    name: str


@dataclass(frozen=True)
class GroupCosine(Jsonable):
    """The cosine between mean gradients of two groups of so many ranks; NaN if every gradient is zero."""

    batches: int
    cosine: float


@dataclass(frozen=True)
class ExpectedAgreement(Jsonable):
    """Agreement of two ranks over the batch of one, (n,), in recorded batches: cosine, and bits shared per value."""

    batches: tuple[float, ...]
    cosine: tuple[float, ...]
    information: tuple[float, ...]


@dataclass(frozen=True)
class RankCount(Jsonable):
    """Redundancy of N ranks, bits per value and rank, and the true gradient's share of the energy of their mean."""

    nodes: int
    redundancy_bits: float
    signal_share_of_mean: float


@dataclass(frozen=True)
class TraceNoise(Jsonable):
    """The noise scale of a model and its layers, and what follows from it over batch and N."""

    world_size: int
    batch_size: int | None
    model: NoiseScale
    layers: tuple[LayerNoise, ...]
    measured_cosine: tuple[GroupCosine, ...]
    expected: ExpectedAgreement
    by_nodes: tuple[RankCount, ...]


def noise_scale(inner: np.ndarray, *, level: float = 0.95) -> NoiseScale:
    """Estimate tr(Sigma) / ||G||^2 from inner products (T, N, N), as a ratio of sums over iterations.
    The mean of <g_i, g_j> over pairs estimates ||G||^2 without bias (appendix A.1, with N ranks for two batch sizes).
    """
    count, ranks = inner.shape[:2]
    if ranks < 2 or count < 4:
        raise GradlabError(f"noise scale: {ranks} ranks, {count} iterations, expected at least 2 and 4")
    signal, noise = (float(value) for value in signal_and_noise(inner).mean(0))
    # An interval for the share of signal, which is finite where the ratio is not, turned over.
    share = _share_of_signal(inner, level)
    low, high = (None if end is None else _batches(float(np.clip(end, 0.0, 1.0))) for end in (share.high, share.low))
    scale = _batches(share.mean or 0.0)
    return NoiseScale(scale, low, high, level, signal, noise, share.refused, share.drift)


def _share_of_signal(inner: np.ndarray, level: float) -> SeriesMean:
    """Estimate signal / (signal + noise) by the delta method (Cochran, "Sampling techniques", 1977, 2.11)."""
    signal, noise = signal_and_noise(inner).T
    energy = signal + noise
    if not energy.mean() > 0:
        return mean_interval(np.zeros(len(inner)), level)
    share = signal.mean() / energy.mean()
    return mean_interval(share + (signal - share * energy) / energy.mean(), level)


def signal_and_noise(inner: np.ndarray) -> np.ndarray:
    """Unbiased ||G||^2 and tr(Sigma) of one rank's batch per iteration, (T, 2), from inner products (T, N, N)."""
    ranks = inner.shape[1]
    energy = np.einsum("tnn->t", inner) / ranks
    signal = (inner.sum((1, 2)) - ranks * energy) / (ranks * (ranks - 1))
    return np.stack([signal, energy - signal], axis=1)


def _batches(share: float) -> float:
    return (1 - min(share, 1.0)) / share if share > 0 else float("inf")  # equal gradients may round to a share above 1


def group_cosine(inner: np.ndarray, size: int) -> float:
    """Compute the cosine between mean gradients of disjoint groups of `size` ranks, from inner products (T, N, N)."""
    ranks = inner.shape[1]
    if not 1 <= size <= ranks // 2:
        raise GradlabError(f"groups of {size} of {ranks} ranks: expected two disjoint ones")
    cosines, generator = [], np.random.default_rng(0)
    for _ in range(_SPLITS):
        drawn = generator.permutation(ranks)
        group, other = drawn[:size], drawn[size : 2 * size]
        here, there = (inner[:, g][:, :, g].sum((1, 2)) for g in (group, other))
        across = inner[:, group][:, :, other].sum((1, 2))
        scale = np.sqrt(here * there)
        cosines.append(np.divide(across, scale, out=np.full(len(inner), np.nan), where=scale > 0))
    values = np.concatenate(cosines)
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def expected_cosine(batches: float, scale: float) -> float:
    """Cosine between ranks with a batch of `batches` times the recorded one, at a noise scale in recorded batches."""
    return 1 / (1 + scale / batches) if np.isfinite(scale) else 0.0


def redundancy(cosine: float, ranks: int) -> float:
    """Compute bits per value and rank that N equally correlated Gaussian gradients share: -log2 det R / (2 N),
    det R = (1 - rho)^(N - 1) (1 + (N - 1) rho).
    """
    rho = float(np.clip(cosine, 0.0, 1 - 1e-12))
    determinant = (ranks - 1) * np.log2(1 - rho) + np.log2(1 + (ranks - 1) * rho)
    return float(-determinant / (2 * ranks))


def measure_noise_scale(inner: np.ndarray, names: list[str], batch_size: int | None) -> TraceNoise:
    """Measure the noise scale of the model and by layer, from inner products by layer (L, T, N, N)."""
    total = inner.sum(0)
    model = noise_scale(total)
    ranks, scale = total.shape[1], model.batches
    return TraceNoise(
        ranks,
        batch_size,
        model,
        layers=tuple(LayerNoise(**vars(noise_scale(rows)), name=name) for name, rows in zip(names, inner, strict=True)),
        measured_cosine=tuple(GroupCosine(size, group_cosine(total, size)) for size in _sizes(ranks // 2)),
        expected=_expected_agreement(scale),
        by_nodes=tuple(
            RankCount(count, redundancy(expected_cosine(1, scale), count), expected_cosine(count, scale))
            for count in _RANK_COUNTS
        ),
    )


def _expected_agreement(scale: float) -> ExpectedAgreement:
    cosines = tuple(expected_cosine(factor, scale) for factor in _BATCH_FACTORS)
    return ExpectedAgreement(
        _BATCH_FACTORS, cosines, information=tuple(float(gaussian_information(cosine)) for cosine in cosines)
    )


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]
