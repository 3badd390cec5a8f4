"""A small convolutional network with buffers, for images of one channel and 8 by 8 pixels."""

from __future__ import annotations

import torch
from torch import nn


def image_network(channels: tuple[int, int] = (16, 32), hidden: int = 48, classes: int = 10) -> nn.Module:
    """Build the network; it has the same values wherever it is built.

    Args:
        channels: of the two convolutions; the second one halves both sides of the image.
        hidden: values between the two linear layers.
        classes: values of the output (images, classes).
    """
    first, second = channels
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * second, hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
