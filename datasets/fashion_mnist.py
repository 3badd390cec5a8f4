"""Fashion-MNIST with a small convolutional network, from files that the user has.

Data: Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms"
(2017), which replaces MNIST file by file. Model: McMahan et al. (2017), see `convnet`.
"""

from __future__ import annotations

from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn

from gradlab.datasets.convnet import initialized
from gradlab.datasets.idx import read_idx
from gradlab.datasets.image_npz import read_npz
from gradlab.datasets.metric import ACCURACY
from gradlab.datasets.published import FASHION_MNIST, fashion_mnist_files, others, tell
from gradlab.datasets.recipe import Recipe
from gradlab.datasets.splits import CLASSES, Splits, checked
from gradlab.datasets.workload import Data, Workload, limited_data
from gradlab.errors import GradlabError

IMAGE = (28, 28)  # height, width
# Mean and standard deviation of a pixel over the published training images, on the scale 0 to 1.
PIXEL_MEAN, PIXEL_DEVIATION = 0.2860, 0.3530
# Names as published; some distributions write a dot for the hyphen before idx. Any file may be compressed.
FILES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}
_EXPECTED = (
    f"an .npz with {', '.join(Splits._fields)}, or the folder of the four IDX files "
    f"({', '.join(FILES.values())}; plain or .gz)"
)


@final
class FashionMnist(Workload):
    """60,000 training and 10,000 test images (1, 28, 28) of clothes in 10 classes; a network of 1,663,370 parameters.

    The recipe trains ten epochs on two ranks with batches of 64.
    """

    name = "fashion_mnist"
    description = "Fashion-MNIST images of 28x28 pixels (from a path you give), two convolutions and a hidden layer"
    pairing = "Xiao et al. 2017 in the place of MNIST in McMahan et al. 2017, section 3; the recipe is our own"
    recipe = Recipe(learning_rate=0.05, momentum=0.9, weight_decay=5e-4, batch_size=64, steps=4680, warmup_steps=50)
    metric = ACCURACY
    needs_path = True

    def load(self, path: str | None = None, *, train_limit: int | None = None, test_limit: int | None = None) -> Data:
        """Load images from an .npz or a folder of IDX files, normalised by the pixels' mean and deviation.

        A float32 image takes 3,136 bytes, the whole set 220 MB.
        """
        if path is None:
            raise GradlabError(f"workload fashion_mnist needs a path: {_EXPECTED}")
        return limited_data(read_splits(path), normalized, train_limit, test_limit)

    def model(self, seed: int) -> nn.Module:
        return initialized(CLASSES, seed)

    def augment(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return `x` unchanged: all images are centred and face one way, in training as in testing."""
        return x


def normalized(images: np.ndarray) -> torch.Tensor:
    """Normalise uint8 (samples, H, W) to float32 (samples, 1, H, W): (value / 255 - mean) / deviation."""
    x = torch.from_numpy(images.astype(np.float32))[:, None]
    return x.div_(255).sub_(PIXEL_MEAN).div_(PIXEL_DEVIATION)


def read_splits(path: str) -> Splits:
    """Read the images and labels of an .npz or of a folder of IDX files.

    As many images as were published, which are not the published ones, are warned of.

    Raises:
        GradlabError: if the path is missing, cannot be read, or does not hold Fashion-MNIST.
    """
    place = Path(path)
    try:
        splits = checked(_read(place, path), IMAGE, path)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    tell(path, others(splits, FASHION_MNIST, fashion_mnist_files(splits), (60_000, 10_000)))
    return splits


def _read(place: Path, path: str) -> Splits:
    if place.is_dir():
        return Splits(**{key: read_idx(_file(place, name), _item(key)) for key, name in FILES.items()})
    if not place.is_file():
        what = "not a regular file" if place.exists() else "no such file or folder"
        raise GradlabError(f"{path}: {what}, give {_EXPECTED}")
    with place.open("rb") as stream:
        head = stream.read(2)
    if head == b"PK":
        return read_npz(place, IMAGE)
    raise GradlabError(f"{path}: not an .npz file, give {_EXPECTED}")


def _item(key: str) -> tuple[int, ...]:
    return IMAGE if key.startswith("x") else ()


def _file(folder: Path, name: str) -> Path:
    for stem in (name, name.replace("-idx", ".idx")):
        for ending in ("", ".gz"):
            if (folder / (stem + ending)).is_file():
                return folder / (stem + ending)
    raise GradlabError(
        f"{folder}: no file {name} or {name}.gz; expected the four IDX files {', '.join(FILES.values())}"
    )
