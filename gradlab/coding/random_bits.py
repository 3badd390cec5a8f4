"""Random bits for rounding, drawn many at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import numpy as np
import torch


class Redrawn(ABC):
    """Stands for a generator in an exchange that is recorded: whenever the recording runs, its numbers are others."""

    @abstractmethod
    def on(self, device: torch.device) -> torch.Generator:
        """Provide a generator on a device that is seeded as `RandomBits` would, before each run of the recording."""


def next_seed(generator: torch.Generator) -> int:
    """Draw the seed of another stream."""
    # Read without an operation that a recording would take for a wait for the device.
    return cast("int", torch.randint(2**62, (), generator=generator, device=generator.device).tolist())


class RandomBits:
    """A stream of uniform random bits on a device, seeded by a generator's next draw. On the CPU it is numpy's Philox,
    as in kernels of a GPU, which count its numbers too.

    seed: the key of that stream; None: while an exchange is recorded.
    """

    def __init__(self, generator: torch.Generator | Redrawn, device: torch.device) -> None:
        self.seed = None if isinstance(generator, Redrawn) else next_seed(generator)
        self._generator = generator.on(device) if isinstance(generator, Redrawn) else None
        self._counted = np.random.Philox(key=self.seed) if self.seed is not None and device.type == "cpu" else None

    def sixteen(self, like: torch.Tensor) -> torch.Tensor:
        """Draw uniform integers in [-2^15, 2^15), int16, in the shape of `like`, 64 bits at a time."""
        count = -(-like.numel() // 4) or 1
        if self._counted is not None:
            words = torch.from_numpy(self._counted.random_raw(count).view(np.int64))
        else:
            if self._generator is None:
                self._generator = torch.Generator(like.device).manual_seed(self.seed or 0)
            words = torch.empty(count, dtype=torch.int64, device=like.device)
            words.random_(-(2**63), None, generator=self._generator)
        return words.view(torch.int16)[: like.numel()].view(like.shape)
