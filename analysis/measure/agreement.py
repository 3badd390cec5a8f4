"""How far ranks agree: cosine between their gradients, and signal against noise."""

from __future__ import annotations

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
