"""How far ranks agree: cosine between their gradients, signal against noise, and where their largest values lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np


def rank_cosine(inner: np.ndarray) -> np.ndarray:
    """Compute the mean cosine over pairs of ranks, (T,), from inner products (T, N, N); NaN for N = 1."""
    norms = np.sqrt(np.einsum("tnn->tn", inner))
    scale = norms[:, :, None] * norms[:, None, :]
    cosines = np.divide(inner, scale, out=np.full_like(inner, np.nan), where=scale > 0)
    upper = np.triu_indices(inner.shape[1], k=1)
    pairs = cosines[:, upper[0], upper[1]]
    return pairs.mean(1) if pairs.shape[1] else np.full(len(inner), np.nan)


def signal_to_noise(inner: np.ndarray) -> float | None:
    """Compute ||s||^2 / ||e||^2 from inner products (T, N, N) summed over steps; None for one rank or without noise.
    With g_n = s + e_n and independent noise, the mean of <g_i, g_j> over pairs estimates ||s||^2 without bias.
    """
    total, ranks = inner.sum(0), inner.shape[1]
    if ranks < 2:
        return None
    energy = np.trace(total) / ranks
    signal = (total.sum() - np.trace(total)) / (ranks * (ranks - 1))
    noise = energy - signal
    return float(max(0.0, signal) / noise) if noise > 1e-12 * energy else None


def index_overlaps(gradients: Sequence[np.ndarray], counts: Sequence[int]) -> list[tuple[float, float]]:
    """Compute two overlaps of top-k positions of gradients (n,) for each k (Chen et al., "ScaleCom", NeurIPS 2020),
    means over pairs: the share of equal positions, and a gradient's energy at the other's over that at its own.
    """
    ordered = [_largest(gradient, max(counts)) for gradient in gradients]
    return [_overlap(gradients, [positions[:count] for positions in ordered]) for count in counts]


def _largest(gradient: np.ndarray, count: int) -> np.ndarray:
    """Positions of the largest magnitudes, falling: (count,)."""
    magnitudes = np.abs(gradient)
    largest = np.argpartition(magnitudes, -count)[-count:]
    return np.asarray(largest[np.argsort(-magnitudes[largest], kind="stable")])


def _overlap(gradients: Sequence[np.ndarray], largest: Sequence[np.ndarray]) -> tuple[float, float]:
    chosen = np.zeros((len(gradients), len(gradients[0])), bool)
    for rank, positions in enumerate(largest):
        chosen[rank, positions] = True
    energies = [float(np.square(g[own], dtype=np.float64).sum()) for g, own in zip(gradients, largest, strict=True)]
    overlaps, kept = [], []
    for a, b in itertools.permutations(range(len(gradients)), 2):
        overlaps.append(int(chosen[a][largest[b]].sum()) / len(largest[b]))
        if energies[a] > 0:
            kept.append(float(np.square(gradients[a][largest[b]], dtype=np.float64).sum()) / energies[a])
    return float(np.mean(overlaps)), float(np.mean(kept)) if kept else 0.0
