"""A convolutional network that is often used in distributed optimisation, for grey images of 28x28 pixels.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), section 3:
two 5x5 convolutions of 32 and 64 channels, each with 2x2 max pooling, a hidden layer of 512 units, 1,663,370
parameters. One matrix has 97 % of them, and decides what a compressor achieves.
Initialisation: He et al., "Delving Deep into Rectifiers" (ICCV 2015), eq. 10 (fan in).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_CHANNELS = (32, 64)
_SIDE = 7  # pixels: 28, halved twice
_UNITS = 512
_HEAD_DEVIATION = 0.01  # small, so that a new network gives all classes about equal probabilities


class ConvolutionalNetwork(nn.Module):
    """Images (batch, 1, 28, 28) -> logits (batch, classes)."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, _CHANNELS[0], 5, padding=2)
        self.conv2 = nn.Conv2d(_CHANNELS[0], _CHANNELS[1], 5, padding=2)
        self.hidden = nn.Linear(_CHANNELS[1] * _SIDE * _SIDE, _UNITS)
        self.head = nn.Linear(_UNITS, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution in (self.conv1, self.conv2):
            x = functional.max_pool2d(functional.relu(convolution(x)), 2)
        return self.head(functional.relu(self.hidden(x.flatten(1))))


def initialized(classes: int, seed: int) -> ConvolutionalNetwork:
    """Build a network on the CPU whose values follow from the seed alone."""
    # Layers draw their default values from the global generator: those draws are undone, then overwritten.
    with torch.random.fork_rng(devices=[]):
        network = ConvolutionalNetwork(classes)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if name == "head.weight":
            nn.init.normal_(parameter, std=_HEAD_DEVIATION, generator=generator)
        elif parameter.ndim > 1:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
        else:
            nn.init.zeros_(parameter)
    return network
