"""Gradient noise scale, and how redundant nodes' gradients become with larger batches and more nodes.

McCandlish, Kaplan, Amodei et al., "An empirical model of large-batch training" (2018), section 2.2 and appendix A.1: a
gradient of batch b is the true one plus noise of covariance Sigma / b. B = tr(Sigma) / ||G||^2, in examples, is where
signal and noise are equal. Nodes that compute batches of b see cosine 1 / (1 + B / b) between them: B >> b means that
they share next to nothing, so that no code can save much by looking at what is common, and averaging over N nodes is
what makes the gradient: compression error is then one more noise. B << N b means more nodes buy little.

All of it follows from inner products between nodes (T, N, N), for which each sum over layers is exact.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gradlab.analysis.measure.information import block_bootstrap, block_length, bootstrap_interval, gaussian_information
from gradlab.errors import GradlabError

_SPLITS = 32  # of the nodes into two groups, drawn
_BATCH_FACTORS = tuple(2.0**k for k in range(-4, 11))


@dataclass(frozen=True)
class NoiseScale:
    """B in batches of one node (times the batch's size: in examples), with its interval; infinity: no signal found.

    signal: ||G||^2, noise: tr(Sigma) of one node's batch, means over iterations.
    """

    batches: float
    low: float
    high: float
    level: float
    signal: float
    noise: float


def noise_scale(
    inner: np.ndarray, generator: np.random.Generator, *, level: float = 0.95, resamples: int = 1000
) -> NoiseScale:
    """tr(Sigma) / ||G||^2 from inner products (T, N, N), ratio of sums over iterations; moving-block bootstrap over T.

    With N nodes the mean of <g_i, g_j> over pairs estimates ||G||^2 without bias (appendix A.1, for N in place of two
    batch sizes).

    Raises:
        GradlabError: for one node, or fewer than 4 iterations.
    """
    count, nodes = inner.shape[:2]
    if nodes < 2 or count < 4:
        raise GradlabError(f"noise scale: {nodes} nodes, {count} iterations, expected at least 2 and 4")
    rows = signal_and_noise(inner)
    signal, noise = rows.mean(0)
    length = block_length(count)
    means = block_bootstrap(rows, generator, length, resamples)
    # An interval for the share of signal, which is finite where the ratio is not, turned over.
    share = signal / (signal + noise) if signal + noise > 0 else 0.0
    shares = np.divide(means[:, 0], means.sum(1), out=np.zeros(len(means)), where=means.sum(1) > 0)
    ends = bootstrap_interval(share, shares, level, -(-count // length))
    low, high = (float(np.clip(end, 0.0, 1.0)) for end in ends)
    return NoiseScale(
        _batches(share), _batches(high), _batches(low), level, float(signal), float(noise)
    )  # fmt: skip


def signal_and_noise(inner: np.ndarray) -> np.ndarray:
    """Unbiased ||G||^2 and tr(Sigma) of one node's batch per iteration, (T, 2), from inner products (T, N, N)."""
    nodes = inner.shape[1]
    energy = np.einsum("tnn->t", inner) / nodes
    signal = (inner.sum((1, 2)) - nodes * energy) / (nodes * (nodes - 1))
    return np.stack([signal, energy - signal], axis=1)


def _batches(share: float) -> float:
    return (1 - share) / share if share > 0 else float("inf")


def group_cosine(inner: np.ndarray, size: int) -> float:
    """Cosine between the mean gradients of disjoint groups of `size` nodes, from inner products (T, N, N).

    The mean of so many nodes is a node with a batch so many times as large: measured, not extrapolated.

    Raises:
        GradlabError: if there are no two such groups.
    """
    nodes = inner.shape[1]
    if not 1 <= size <= nodes // 2:
        raise GradlabError(f"groups of {size} of {nodes} nodes: expected two disjoint ones")
    found, generator = [], np.random.default_rng(0)
    for _ in range(_SPLITS):
        drawn = generator.permutation(nodes)
        group, other = drawn[:size], drawn[size : 2 * size]
        here, there = (inner[:, g][:, :, g].sum((1, 2)) for g in (group, other))
        across = inner[:, group][:, :, other].sum((1, 2))
        scale = np.sqrt(here * there)
        found.append(np.divide(across, scale, out=np.full(len(inner), np.nan), where=scale > 0))
    values = np.concatenate(found)
    return float(np.nanmean(values)) if np.isfinite(values).any() else float("nan")


def expected_cosine(batches: float, scale: float) -> float:
    """Between nodes that compute so many of today's batches each, at a noise scale in these batches."""
    return 1 / (1 + scale / batches) if np.isfinite(scale) else 0.0


def redundancy(cosine: float, nodes: int) -> float:
    """Bits per value and node that N nodes' gradients share, if they are Gaussian and equally correlated.

    (sum of entropies - joint entropy) / N = -log2 det R / (2 N), det R = (1 - rho)^(N - 1) (1 + (N - 1) rho): what
    coding them together could save against coding each by itself, at rates that resolve the noise too.
    """
    rho = float(np.clip(cosine, 0.0, 1 - 1e-12))
    determinant = (nodes - 1) * np.log2(1 - rho) + np.log2(1 + (nodes - 1) * rho)
    return float(-determinant / (2 * nodes))


def measure_noise_scale(
    inner: np.ndarray, names: list[str], batch_size: int | None, generator: np.random.Generator
) -> dict[str, Any]:
    """Plain JSON from inner products by layer (L, T, N, N): of the model and by layer, with curves over batch and N."""
    total = inner.sum(0)
    whole = noise_scale(total, generator)
    nodes = total.shape[1]
    scale = whole.batches
    return {
        "world_size": nodes,
        "batch_size": batch_size,
        "model": asdict(whole),
        "layers": [
            {"name": name, **asdict(noise_scale(rows, generator))} for name, rows in zip(names, inner, strict=True)
        ],
        "measured_cosine": [{"batches": size, "cosine": group_cosine(total, size)} for size in _sizes(nodes // 2)],
        "expected": {
            "batches": list(_BATCH_FACTORS),
            "cosine": [expected_cosine(factor, scale) for factor in _BATCH_FACTORS],
            "information": [gaussian_information(expected_cosine(factor, scale)) for factor in _BATCH_FACTORS],
        },
        "by_nodes": [
            {
                "nodes": count,
                "redundancy_bits": redundancy(expected_cosine(1, scale), count),
                "signal_share_of_mean": expected_cosine(count, scale),
            }
            for count in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        ],
    }


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [2**power for power in range(most.bit_length())]
