"""Search the step under which levels have a wanted size, and cut a sample of layers on which it is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

_RUN = 256  # values of a sample that lie in a row
_TRIES = 16
_NEAR = 0.01  # share of what is wanted that a step may miss it by
_CLOSE = 0.004  # octaves between steps that count as one
_FARTHEST = 4.0  # octaves from one try to the next


def searched_step(
    measured: Callable[[float], float], wanted: float, finest: float, coarsest: float, guess: float
) -> float:
    """Find the step between `finest` and `coarsest` whose measure is `wanted`, or the finest one whose measure is below
    it. The measure, above 0, rises as steps get finer: bits, or signal over distortion."""
    fine, coarse = math.log2(finest), math.log2(coarsest)
    above = below = None  # the measures of `fine` and of `coarse`, where known, relative to what is wanted, in octaves
    at = math.log2(guess) if guess > 0 else fine
    for number in range(_TRIES):
        if not fine < at < coarse or number % 3 == 2:
            at = (fine + coarse) / 2
        beyond = math.log2(max(measured(2.0**at), 1e-9) / wanted)
        if abs(beyond) < _NEAR:
            return 2.0**at
        if beyond > 0:
            fine, above = at, beyond
        else:
            coarse, below = at, beyond
        if coarse - fine < _CLOSE:
            break
        if above is None or below is None:
            at += max(-_FARTHEST, min(_FARTHEST, beyond * max(0.6, wanted)))
        else:
            at = fine + (coarse - fine) * above / (above - below)
    return 2.0**coarse


def sample_of(vector: torch.Tensor, sizes: Sequence[int], count: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Take about `count` values of a vector (numel,) in runs that are spread evenly, on the host, and count each
    layer's."""
    every = vector.numel() // count
    if every < 2:
        return vector.cpu(), tuple(sizes)
    runs = vector[: vector.numel() // (every * _RUN) * every * _RUN].view(-1, every * _RUN)
    ends = np.minimum(np.cumsum(np.array(sizes, np.int64)), runs.numel())
    before = ends // (every * _RUN) * _RUN + np.minimum(ends % (every * _RUN), _RUN)  # in the sample, by layer
    return runs[:, :_RUN].reshape(-1).cpu(), tuple(np.diff(before, prepend=0).tolist())
