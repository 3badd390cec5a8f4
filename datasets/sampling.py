"""The order of training samples: it depends on the seed alone, whatever is done to the gradients."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gradlab.errors import GradlabError


def batches(
    num_samples: int, batch_size: int, rank: int, world_size: int, seed: int, steps: int
) -> Iterator[torch.Tensor]:
    """Yield the sample indices of one rank, step by step: `steps` int64 tensors (batch_size,).

    Each epoch is one permutation drawn from (seed, epoch) and cut into global batches of world_size x batch_size. A
    rank takes its own part of each global batch. The last incomplete global batch is left out. So the batches of the
    ranks are disjoint in a step, no sample comes twice in an epoch, and the samples of a step depend on the product
    world_size x batch_size alone.

    Raises:
        GradlabError: at the call, if an argument is out of range or a global batch exceeds the data set.
    """
    if not 0 <= rank < world_size:
        raise GradlabError(f"rank {rank} of {world_size}: expected 0 to world size - 1")
    if batch_size < 1 or seed < 0 or steps < 0:
        raise GradlabError(f"batch size {batch_size}, seed {seed}, steps {steps}: expected >= 1, >= 0, >= 0")
    share = num_samples // world_size
    if batch_size > share:
        raise GradlabError(
            f"batch size {batch_size} is larger than a rank's share of {share} samples "
            f"({num_samples} over {world_size} ranks): use a smaller batch or fewer ranks"
        )
    return _batches(num_samples, batch_size, rank, world_size, seed, steps)


def _batches(
    num_samples: int, batch_size: int, rank: int, world_size: int, seed: int, steps: int
) -> Iterator[torch.Tensor]:
    global_batch = world_size * batch_size
    per_epoch = num_samples // global_batch
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        if place == 0:
            order = torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(num_samples))
        start = place * global_batch + rank * batch_size
        yield order[start : start + batch_size]
