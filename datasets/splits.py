"""The arrays of an image data set as they lie in a file, before normalisation, and checks of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gradlab.errors import GradlabError

CLASSES = 10
MAX_IMAGES = 200_000  # in one split: a header that claims more is refused before memory is taken
MAX_SIDE = 2048  # pixels, where the file determines the size of an image
MAX_BYTES = 2**30  # of an array of one split; as float32 or int64 it takes four or eight times that


class Splits(NamedTuple):
    """Images and classes to train and to test on.

    x_train, x_test: uint8 (samples, height, width[, colours]).
    y_train, y_test: integers, one class of every image (samples,), or of every pixel (samples, height, width).
    """

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def check_header(
    key: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    image: tuple[int, ...],
    source: str,
    target: tuple[int, ...] = (),
) -> None:
    """Refuse an array by its shape and type alone.

    Args:
        key: the array's field in `Splits`.
        shape, dtype: of the array.
        image: shape of one image, (height, width) or (height, width, colours).
        source: the file's name, for messages.
        target: shape of one image's classes, () for one class.
    Raises:
        GradlabError: for objects, a wrong type or shape, no samples, or more than MAX_IMAGES or MAX_BYTES.
    """
    images = key.startswith("x")
    kind = dtype == np.uint8 if images else dtype.kind in "iu"
    sides = image if images else target
    shown = ", ".join(["(samples", *map(str, sides)]) + ")" if sides else "(samples,)"
    expected = f"{'uint8' if images else 'integers'} of shape {shown}"
    if dtype.hasobject or not kind or len(shape) < 1 or shape[1:] != sides:
        raise GradlabError(f"{source}: {key} is {dtype} of shape {shape}, expected {expected}")
    if not 1 <= shape[0] <= MAX_IMAGES:
        raise GradlabError(f"{source}: {key} holds {shape[0]} samples, expected 1 to {MAX_IMAGES}")
    if math.prod(shape) > MAX_BYTES:
        raise GradlabError(f"{source}: {key} of shape {shape} holds {math.prod(shape)} values, at most {MAX_BYTES}")


def checked(
    splits: Splits, image: tuple[int, ...], source: str, target: tuple[int, ...] = (), classes: int = CLASSES
) -> Splits:
    """Check that images and labels fit each other.

    Args:
        splits: the arrays.
        image: shape of one image.
        source: the file's name, for messages.
        target: shape of one image's labels, () for one label.
        classes: number of classes.

    Returns:
        The same arrays, with labels as int64.

    Raises:
        GradlabError: for a wrong type or shape, a label outside 0 to classes - 1, or labels that do not match the
            images.
    """
    for key, array in splits._asdict().items():
        check_header(key, array.shape, array.dtype, image, source, target)
    for split in ("train", "test"):
        images, labels = getattr(splits, f"x_{split}"), getattr(splits, f"y_{split}")
        if len(images) != len(labels):
            raise GradlabError(f"{source}: {len(images)} {split} images but {len(labels)} labels")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise GradlabError(f"{source}: y_{split} runs from {low} to {high}, expected 0 to {classes - 1}")
    return splits._replace(
        y_train=splits.y_train.astype(np.int64, copy=False), y_test=splits.y_test.astype(np.int64, copy=False)
    )


def reason(error: Exception) -> str:
    """Return the start of an error's first line: libraries' messages can have many lines and quote the file."""
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
