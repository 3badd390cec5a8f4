"""CamVid road scenes with a class for every pixel, from the user's file, and a small pyramid scene parsing network.

Data: Brostow, Fauqueur and Cipolla, "Semantic object classes in video: A high-definition ground truth database" (2009),
in the 11 classes of Badrinarayanan, Kendall and Cipolla, "SegNet" (2017). Model: Zhao et al. (2017), see `pspnet`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn

from gradlab.datasets.cifar10 import normalized
from gradlab.datasets.image_npz import read_npz
from gradlab.datasets.metric import IGNORED, PIXEL_ACCURACY
from gradlab.datasets.pspnet import initialized
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.splits import Splits, checked
from gradlab.datasets.workload import Data, Workload, limited_data
from gradlab.errors import GradlabError

CLASSES = 11
UNLABELLED = 11  # the files' class of pixels without a class
MIN_SIDE = 16  # pixels of an image's side: an eighth of them is left before the pyramid
WIDTHS = (16, 32, 64, 64)
_EXPECTED = (
    "an .npz with x_train, x_test (samples, height, width, 3), bytes, and y_train, y_test (samples, height, width), "
    f"classes 0 to {CLASSES - 1} and {UNLABELLED} for none"
)


@final
class CamVid(Workload):
    """Images (3, height, width) of streets, whose pixels have 11 classes; a network of 227,355 parameters.

    Pixels without a class count neither in the loss nor in the accuracy.
    """

    name = "camvid"
    description = "CamVid road scenes, every pixel with its class (from a path you give), a small PSPNet"
    pairing = "PSPNet on CamVid is the pairing of LGC, section VI-D; size and recipe are our own"
    recipe = Recipe(learning_rate=0.05, momentum=0.9, weight_decay=1e-4, batch_size=2, steps=1000, warmup_steps=20)
    metric = PIXEL_ACCURACY
    needs_path = True
    interim_samples = 10

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load images of one size, whichever it is, from an .npz, normalised by colour; float32, 12 bytes per pixel."""
        if path is None:
            raise GradlabError(f"workload camvid needs a path: {_EXPECTED}")
        data = limited_data(read_splits(path), normalized, train_limit, test_limit)
        return replace(data, train_y=_ignoring(data.train_y), test_y=_ignoring(data.test_y))

    def model(self, seed: int) -> nn.Module:
        return initialized(WIDTHS, CLASSES, seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return `x` unchanged: altered images would need altered labels."""
        return x


def read_splits(path: str) -> Splits:
    """Read the images and their pixels' classes, as they lie in the file.

    Args:
        path: an .npz.

    Returns:
        The arrays, with classes from 0 to 11; 11 is no class.

    Raises:
        GradlabError: if the path is missing, cannot be read, or does not hold images with a class for every pixel.
    """
    place = Path(path)
    if not place.is_file():
        raise GradlabError(f"{path}: {'not a regular file' if place.exists() else 'no such file'}, give {_EXPECTED}")
    try:
        splits = read_npz(place, None)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    image = splits.x_train.shape[1:]
    if min(image[:2]) < MIN_SIDE:
        raise GradlabError(f"{path}: pictures of {image[0]} x {image[1]}, expected sides of at least {MIN_SIDE} pixels")
    labelled = checked(splits, image, path, np.shape(splits.y_train)[1:], classes=CLASSES + 1)
    for key in ("y_train", "y_test"):
        if bool((getattr(labelled, key) == UNLABELLED).all()):
            raise GradlabError(f"{path}: {key}: no pixel has a class, all are {UNLABELLED}")
    return labelled


def _ignoring(classes: torch.Tensor) -> torch.Tensor:
    return classes.masked_fill(classes == UNLABELLED, IGNORED)
