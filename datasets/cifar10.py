"""CIFAR-10, from the user's file, with ResNet-20.

Data: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009). Model, augmentation and recipe:
He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import nn

from gradlab.datasets.cifar_files import read_splits
from gradlab.datasets.metric import ACCURACY
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.resnet import initialized
from gradlab.datasets.workload import Data, Workload, limited_data
from gradlab.errors import GradlabError

# Mean and standard deviation of each colour over the published training images, on the scale 0 to 1.
CHANNEL_MEAN = (0.4914, 0.4822, 0.4465)
CHANNEL_DEVIATION = (0.2470, 0.2435, 0.2616)
_PADDING = 4  # pixels on each side before the random crop
_CHUNK = 4096  # images converted at a time, to keep the peak of memory near the result's size


@final
class Cifar10(Workload):
    """50,000 training and 10,000 test images (3, 32, 32) in 10 classes; ResNet-20 of 269,722 parameters.

    Two ranks of 64 make the paper's batch of 128. The learning rate falls tenfold at 32k and at 48k of 64k steps.
    """

    name = "cifar10"
    description = "CIFAR-10 images of 32x32 pixels (from a path you give), ResNet-20"
    pairing = "He et al. 2016, section 4.2: batch 128 (2 ranks of 64), 64k steps, random crop and flip"
    recipe = Recipe(learning_rate=0.1, momentum=0.9, weight_decay=1e-4, batch_size=64, steps=64000, schedule="step")
    metric = ACCURACY
    needs_path = True

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load images from an .npz, a published archive or its extracted folder, normalised by colour.

        A float32 image takes 12,288 bytes, the whole set 737 MB; a limit saves memory in a short run.
        """
        if path is None:
            raise GradlabError(
                "workload cifar10 needs a path: an .npz with x_train, y_train, x_test, y_test, or the published "
                "cifar-10-python.tar.gz or cifar-10-binary.tar.gz, or the folder extracted from either"
            )
        return limited_data(read_splits(path), normalized, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        """Build ResNet-20: three stages of three blocks, with 16, 32 and 64 channels."""
        return initialized(channels=3, widths=(16, 32, 64), blocks=(3, 3, 3), classes=10, seed=seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Pad images (batch, channels, H, W) by 4 zeros, crop them at random, and mirror each with probability 1/2."""
        return random_flip(random_crop(x, _PADDING, generator), generator)


def normalized(images: np.ndarray) -> torch.Tensor:
    """Normalise uint8 (samples, H, W, 3) to float32 (samples, 3, H, W): (value / 255 - mean) / deviation by colour."""
    mean = torch.tensor(CHANNEL_MEAN).reshape(3, 1, 1)
    deviation = torch.tensor(CHANNEL_DEVIATION).reshape(3, 1, 1)
    samples, height, width, channels = images.shape
    result = torch.empty(samples, channels, height, width)
    for start in range(0, samples, _CHUNK):
        chunk = torch.from_numpy(images[start : start + _CHUNK].copy()).permute(0, 3, 1, 2)
        result[start : start + _CHUNK] = (chunk / 255 - mean) / deviation
    return result


def random_crop(x: torch.Tensor, padding: int, generator: torch.Generator) -> torch.Tensor:
    """Pad images (batch, C, H, W) with zeros, and cut each at its own offset, uniform in 0 to 2 x padding pixels."""
    batch, _, height, width = x.shape
    offsets = torch.randint(2 * padding + 1, (2, batch), generator=generator).to(x.device)
    rows = offsets[0][:, None] + torch.arange(height, device=x.device)
    columns = offsets[1][:, None] + torch.arange(width, device=x.device)
    padded = nn.functional.pad(x, (padding,) * 4)
    images = torch.arange(batch, device=x.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()


def random_flip(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mirror each image (batch, C, H, W) left to right with probability 1/2."""
    mirrored = torch.rand(x.shape[0], generator=generator).to(x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(3), x)
