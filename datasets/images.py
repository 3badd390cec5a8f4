"""Workloads of images that the user has as an .npz: CIFAR-10, Fashion-MNIST, CamVid.

CIFAR-10: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009); model, augmentation and recipe
of He et al., "Deep Residual Learning for Image Recognition" (2016), section 4.2. Fashion-MNIST: Xiao, Rasul and
Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms" (2017); model of McMahan
et al. (2017), see `convnet`. CamVid: Brostow, Fauqueur and Cipolla, "Semantic object classes in video: A
high-definition ground truth database" (2009), in the 11 classes of Badrinarayanan, Kendall and Cipolla, "SegNet"
(2017); model of Zhao et al. (2017), see `pspnet`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradlab.datasets import convnet, pspnet, resnet
from gradlab.datasets.metric import ACCURACY, IGNORED, PIXEL_ACCURACY
from gradlab.datasets.npz import EXPECTED, Splits, read_npz
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.workload import Data, Workload, limited
from gradlab.errors import GradlabError

# Mean and standard deviation of each colour over the published training images, on the scale 0 to 1.
CIFAR_MEAN, CIFAR_DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
FASHION_MEAN, FASHION_DEVIATION = (0.2860,), (0.3530,)
UNLABELLED = 11  # CamVid's class of pixels without a class
_PADDING = 4  # pixels on each side before the random crop
_CHUNK = 4096  # images converted at a time, to keep the peak of memory near the result's size


@final
class Cifar10(Workload):
    """50,000 training and 10,000 test images (3, 32, 32) in 10 classes; ResNet-20 of 269,722 parameters.

    Two ranks of 64 make the paper's batch of 128. The learning rate falls tenfold at 32k and at 48k of 64k steps.
    A float32 image takes 12,288 bytes, the whole set 737 MB.
    """

    name = "cifar10"
    recipe = Recipe(learning_rate=0.1, momentum=0.9, weight_decay=1e-4, batch_size=64, steps=64000, schedule="step")
    metric = ACCURACY
    needs_path = True

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        splits = read_npz(self.required(path, EXPECTED), (32, 32, 3), 10)
        return image_data(splits, CIFAR_MEAN, CIFAR_DEVIATION, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        """Build ResNet-20: three stages of three blocks, with 16, 32 and 64 channels."""
        return resnet.initialized(channels=3, widths=(16, 32, 64), blocks=(3, 3, 3), classes=10, seed=seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Pad images (batch, channels, H, W) by 4 zeros, crop them at random, and mirror each with probability 1/2."""
        return random_flip(random_crop(x, _PADDING, generator), generator)


@final
class FashionMnist(Workload):
    """60,000 training and 10,000 test images (1, 28, 28) of clothes in 10 classes; a network of 1,663,370 parameters.

    The recipe, our own, trains ten epochs on two ranks with batches of 64.
    """

    name = "fashion_mnist"
    recipe = Recipe(learning_rate=0.05, momentum=0.9, weight_decay=5e-4, batch_size=64, steps=4680, warmup_steps=50)
    metric = ACCURACY
    needs_path = True

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        splits = read_npz(self.required(path, EXPECTED), (28, 28), 10)
        return image_data(splits, FASHION_MEAN, FASHION_DEVIATION, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        return convnet.initialized(10, seed)


@final
class CamVid(Workload):
    """Images (3, height, width) of streets, whose pixels have 11 classes; a network of 227,355 parameters.

    LGC's section VI-D pairs PSPNet with CamVid; size and recipe are our own. Pixels without a class count neither in
    the loss nor in the accuracy.
    """

    name = "camvid"
    recipe = Recipe(learning_rate=0.05, momentum=0.9, weight_decay=1e-4, batch_size=2, steps=1000, warmup_steps=20)
    metric = PIXEL_ACCURACY
    needs_path = True
    interim_samples = 10

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load images of one size, normalised as CIFAR-10's; class 11 of the file stands for no class."""
        source = self.required(path, f"{EXPECTED}, where class {UNLABELLED} of a pixel stands for none")
        splits = read_npz(source, (None, None, 3), UNLABELLED + 1, per_pixel=True)
        for key in ("y_train", "y_test"):
            if bool((getattr(splits, key) == UNLABELLED).all()):
                raise GradlabError(f"{source}: {key}: no pixel has a class, all are {UNLABELLED}")
        data = image_data(splits, CIFAR_MEAN, CIFAR_DEVIATION, train_limit, test_limit)
        train, test = (y.masked_fill(y == UNLABELLED, IGNORED) for y in (data.train_y, data.test_y))
        return replace(data, train_y=train, test_y=test)

    def model(self, seed: int) -> nn.Module:
        return pspnet.initialized((16, 32, 64, 64), UNLABELLED, seed)


def image_data(
    splits: Splits,
    mean: tuple[float, ...],
    deviation: tuple[float, ...],
    train_limit: int | None,
    test_limit: int | None,
) -> Data:
    """Normalise both splits, each up to its limit."""
    train = limited(len(splits.x_train), train_limit, "train")
    test = limited(len(splits.x_test), test_limit, "test")
    return Data(
        normalized(splits.x_train[:train], mean, deviation),
        torch.from_numpy(splits.y_train[:train].copy()),
        normalized(splits.x_test[:test], mean, deviation),
        torch.from_numpy(splits.y_test[:test].copy()),
    )


def normalized(images: np.ndarray, mean: tuple[float, ...], deviation: tuple[float, ...]) -> torch.Tensor:
    """Compute (value / 255 - mean) / deviation by colour: uint8 (samples, H, W[, C]) -> float32 (samples, C, H, W)."""
    centre, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, deviation))
    result = torch.empty(len(images), len(mean), *images.shape[1:3])
    for start in range(0, len(images), _CHUNK):
        chunk = torch.from_numpy(images[start : start + _CHUNK].copy())
        chunk = chunk.permute(0, 3, 1, 2) if chunk.ndim == 4 else chunk[:, None]
        result[start : start + _CHUNK] = (chunk / 255 - centre) / scale
    return result


def random_crop(x: torch.Tensor, padding: int, generator: torch.Generator) -> torch.Tensor:
    """Pad images (batch, C, H, W) with zeros, and cut each at its own offset, uniform in 0 to 2 x padding pixels."""
    batch, _, height, width = x.shape
    offsets = torch.randint(2 * padding + 1, (2, batch), generator=generator).to(x.device)
    rows = offsets[0][:, None] + torch.arange(height, device=x.device)
    columns = offsets[1][:, None] + torch.arange(width, device=x.device)
    padded = functional.pad(x, (padding,) * 4)
    images = torch.arange(batch, device=x.device)[:, None, None]
    cropped = padded.permute(0, 2, 3, 1)[images, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()


def random_flip(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Mirror each image (batch, C, H, W) left to right with probability 1/2."""
    mirrored = torch.rand(x.shape[0], generator=generator).to(x.device) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(3), x)
