"""Residual networks for small images, with shortcuts that have no parameters.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition" (CVPR 2016), section 4.2: a 3x3 stem, stages
of basic blocks whose first one halves the image, global average pooling, one linear layer; option A shortcuts.
Initialisation: He et al., "Delving Deep into Rectifiers" (ICCV 2015), eq. 14 (fan out).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional


def _conv3x3(inputs: int, outputs: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=dilation, dilation=dilation, bias=False)


class BasicBlock(nn.Module):
    """relu(shortcut(x) + bn(conv(relu(bn(conv(x)))))): (batch, inputs, H, W) -> (batch, outputs, H/s, W/s)."""

    def __init__(self, inputs: int, outputs: int, stride: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv3x3(inputs, outputs, stride, dilation)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = _conv3x3(outputs, outputs, dilation=dilation)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.new_channels = outputs - inputs

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """Take every stride-th pixel, and zeros for the channels that the block adds (option A)."""
        if self.stride == 1 and self.new_channels == 0:
            return x
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.shortcut(x) + self.bn2(self.conv2(inner)))


class ResidualNetwork(nn.Module):
    """A residual network: images (batch, channels, H, W) -> logits (batch, classes).

    The stem has the first stage's width. Every stage but the first halves height and width, and has its number of basic
    blocks.
    """

    def __init__(self, channels: int, widths: Sequence[int], blocks: Sequence[int], classes: int) -> None:
        super().__init__()
        self.stem = _conv3x3(channels, widths[0])
        self.bn = nn.BatchNorm2d(widths[0])
        stages, inputs = [], widths[0]
        for index, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            strides = [1 if index == 0 else 2] + [1] * (count - 1)
            sizes = [inputs] + [width] * (count - 1)
            pairs = zip(sizes, strides, strict=True)
            stages.append(nn.Sequential(*(BasicBlock(size, width, stride) for size, stride in pairs)))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.stages(functional.relu(self.bn(self.stem(x))))
        return self.head(features.mean(dim=(2, 3)))


def initialized(
    channels: int, widths: Sequence[int], blocks: Sequence[int], classes: int, seed: int
) -> ResidualNetwork:
    """Build a `ResidualNetwork` on the CPU whose values follow from the seed alone."""
    # Layers draw their default values from the global generator: those draws are undone, then overwritten.
    with torch.random.fork_rng(devices=[]):
        network = ResidualNetwork(channels, widths, blocks, classes)
    draw_weights(network, seed)
    return network


def draw_weights(network: nn.Module, seed: int) -> None:
    """Draw weights of convolutions and linear layers in the network's order, in place, and set their biases to 0."""
    generator = torch.Generator().manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5, generator=generator)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
