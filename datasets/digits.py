"""Handwritten digits with a small residual network: real data that comes with scikit-learn, no download.

Data: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits" (UCI, 1998), the 1797 test images of
8x8 pixels in 17 grey levels that scikit-learn bundles. Model: the residual network of He et al. (2016), narrow.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradlab.datasets.metric import ACCURACY
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.resnet import initialized
from gradlab.datasets.workload import Data, Workload, limited
from gradlab.errors import GradlabError

TRAIN_SAMPLES = 1437  # 80 % of 1797; the other 360 are the test split
_SPLIT_SEED = 0
_NOISE = 0.5  # in standard deviations of a pixel
_WHITE = 16.0  # pixels are counts from 0 to 16


@final
class Digits(Workload):
    """1437 training and 360 test images (1, 8, 8) in 10 classes; a residual network of 93,562 parameters.

    No paper pairs them: they are the smallest real task on which convolutional compressors can be compared.
    """

    name = "digits"
    recipe = Recipe(learning_rate=0.05, momentum=0.9, weight_decay=5e-4, batch_size=32, steps=300, warmup_steps=20)
    metric = ACCURACY
    needs_path = False

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load the bundled images in a fixed split, normalised by mean and deviation of the training pixels."""
        if path is not None:
            raise GradlabError(f"workload digits is bundled with scikit-learn: give no path (got {path!r})")
        pixels, classes = _bundled()
        order = np.random.default_rng(_SPLIT_SEED).permutation(len(pixels))
        x = torch.from_numpy((pixels[order] / _WHITE).astype(np.float32)).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(classes[order].astype(np.int64))
        # Statistics of the whole training split, so that a limit changes no value.
        deviation, mean = torch.std_mean(x[:TRAIN_SAMPLES])
        x = (x - mean) / deviation
        train = limited(TRAIN_SAMPLES, train_limit, "train")
        test = TRAIN_SAMPLES + limited(len(x) - TRAIN_SAMPLES, test_limit, "test")
        return Data(x[:train], y[:train], x[TRAIN_SAMPLES:test], y[TRAIN_SAMPLES:test])

    def model(self, seed: int) -> nn.Module:
        return initialized(channels=1, widths=(16, 32, 64), blocks=(1, 2, 1), classes=10, seed=seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Move images (batch, 1, 8, 8) by up to one pixel each way, and add Gaussian noise of half a deviation.

        Without augmentation, loss and gradients fall to nothing within 200 steps, and nothing is left to compress.
        """
        move = torch.randint(0, 3, (len(x), 2), generator=generator)
        padded = functional.pad(x, (1, 1, 1, 1), value=float(x.min()))
        rows, columns = (torch.arange(x.shape[2 + axis]) + move[:, axis, None] for axis in (0, 1))
        moved = padded[torch.arange(len(x))[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return moved.permute(0, 3, 1, 2) + _NOISE * torch.randn(x.shape, generator=generator)


def _bundled() -> tuple[np.ndarray, np.ndarray]:
    """Read pixels (1797, 64) and classes (1797,) without importing scikit-learn, which takes as long as 100 steps."""
    spec = find_spec("sklearn")
    file = Path((spec and spec.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():
        table = np.loadtxt(file, delimiter=",")
        return table[:, :-1], table[:, -1].astype(int)
    from sklearn.datasets import load_digits  # for a release that keeps the file elsewhere

    pixels, classes = load_digits(return_X_y=True)
    return pixels, classes
