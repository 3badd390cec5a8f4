"""A small network that labels every pixel, with pyramid pooling.

Zhao, Shi, Qi, Wang and Jia, "Pyramid Scene Parsing Network" (CVPR 2017), section 3.2: features of a residual network
with dilated last stages, their means over grids of 1, 2, 3 and 6 regions a side, a convolution of each, all enlarged
and concatenated, and a last convolution. The network is smaller than the paper's: four stages of one basic block (see
`resnet`), which end at an eighth of the image's sides. The convolutions of means have a bias in place of batch
normalisation, because its statistics of one region would come from only a few images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from gradlab.datasets.resnet import BasicBlock, draw_weights

_REGIONS = (1, 2, 3, 6)  # of each side


class PyramidPooling(nn.Module):
    """Features and their means over ever smaller regions: (batch, channels, H, W) -> (batch, 2 x channels, H, W)."""

    def __init__(self, channels: int, regions: Sequence[int] = _REGIONS) -> None:
        super().__init__()
        self.regions = tuple(regions)
        self.reduced = nn.ModuleList(nn.Conv2d(channels, channels // len(self.regions), 1) for _ in self.regions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = [
            functional.interpolate(
                functional.relu(reduce(functional.adaptive_avg_pool2d(x, side))), x.shape[2:], mode="bilinear"
            )
            for reduce, side in zip(self.reduced, self.regions, strict=True)
        ]
        return torch.cat([x, *means], 1)


class PyramidSceneParsing(nn.Module):
    """Images (batch, 3, H, W) -> logits (batch, H, W, classes). widths: channels of the four stages."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        first, second, third, last = widths
        self.stem = nn.Conv2d(3, first, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(first)
        self.stages = nn.Sequential(
            BasicBlock(first, first, 1),
            BasicBlock(first, second, 2),
            BasicBlock(second, third, 2),
            BasicBlock(third, last, 1, dilation=2),
        )
        self.pyramid = PyramidPooling(last)
        self.joined = nn.Conv2d(2 * last, last, 3, padding=1, bias=False)
        self.joined_bn = nn.BatchNorm2d(last)
        self.head = nn.Conv2d(last, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.pyramid(self.stages(functional.relu(self.bn(self.stem(x)))))
        scores = self.head(functional.relu(self.joined_bn(self.joined(features))))
        return functional.interpolate(scores, x.shape[2:], mode="bilinear").permute(0, 2, 3, 1)


def initialized(widths: Sequence[int], classes: int, seed: int) -> PyramidSceneParsing:
    """Build a network on the CPU whose values follow from the seed alone. widths: channels of the four stages."""
    with torch.random.fork_rng(devices=[]):
        network = PyramidSceneParsing(widths, classes)
    draw_weights(network, seed)
    return network
