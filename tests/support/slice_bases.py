"""Bases of slices that each have their own, as the codec fits them."""

from __future__ import annotations

import torch

from gradlab.codecs.gradiveq import GradiVeQ


def fit_bases(samples: torch.Tensor, mean: torch.Tensor, loss_threshold: float) -> torch.Tensor:
    """(B, K, d) from samples (T, B, K) with their mean (B, K)."""
    return GradiVeQ(GradiVeQ.Settings(loss_threshold, reuse=1)).bases(samples, mean, samples.shape[1])["basis"]
