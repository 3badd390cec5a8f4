"""Random bits for rounding, drawn many at a time."""

from __future__ import annotations

import numpy as np
import torch


class RandomBits:
    """A stream of uniform random bits on a device, seeded by a generator's next draw. On the CPU it is numpy's Philox,
    as in kernels of a GPU, which count its numbers too.

    seed: the key of that stream.
    """

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        self._counted = np.random.Philox(key=self.seed) if device.type == "cpu" else None
        self._generator: torch.Generator | None = None
        self._device = device

    def sixteen(self, like: torch.Tensor) -> torch.Tensor:
        """Draw uniform integers in [-2^15, 2^15), int16, in the shape of `like`, 64 bits at a time."""
        count = -(-like.numel() // 4) or 1
        if self._counted is not None:
            words = torch.from_numpy(self._counted.random_raw(count).view(np.int64))
        else:
            if self._generator is None:
                self._generator = torch.Generator(like.device).manual_seed(self.seed)
            words = torch.empty(count, dtype=torch.int64, device=like.device)
            words.random_(-(2**63), None, generator=self._generator)
        return words.view(torch.int16)[: like.numel()].view(like.shape)

    def below(self, numel: int, count: int) -> torch.Tensor:
        """Draw positions (count,), int64, below numel < 2^32, 64 bits each, the same ones on every device."""
        drawn = np.random.Philox(key=self.seed).random_raw(count)
        positions = ((drawn >> np.uint64(32)) * np.uint64(numel)) >> np.uint64(32)
        return torch.from_numpy(positions.view(np.int64)).to(self._device, non_blocking=True)


def bfloat16_at_random(values: torch.Tensor, bits: RandomBits, out: torch.Tensor) -> torch.Tensor:
    """Round values to one of the two neighbours in bfloat16, into `out`, without bias: 16 random bits are added to the
    half of a float32 that is cut off."""
    moved = bits.sixteen(values).to(torch.int32).add_(2**15).add_(values.float().view(torch.int32))
    cut = moved.bitwise_right_shift_(16).to(torch.int16).view(torch.bfloat16)
    return torch.where(values.isfinite(), cut, values.bfloat16(), out=out)  # NaN would run over
