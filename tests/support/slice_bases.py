"""Bases of slices that each have their own, as the codec fits them."""

from __future__ import annotations

import torch

from gradlab.codecs.gradiveq import GradiVeQ


def fit_bases(
    samples: torch.Tensor, mean: torch.Tensor, loss_threshold: float, limit: int | None = None, held_out: int = 0
) -> torch.Tensor:
    """(B, K, d) from samples (T, B, K) with their mean (B, K); held_out: so many of the latest are not fitted on."""
    settings = GradiVeQ.Settings(loss_threshold, reuse=1, max_dimension=limit, held_out=held_out / len(samples))
    return GradiVeQ(settings).bases(samples, mean, samples.shape[1])["basis"]
