"""The arrays of an image data set as they lie in a file, before normalisation, and what makes them sound."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gradlab.errors import GradlabError

CLASSES = 10
MAX_IMAGES = 200_000  # in one split: a header that claims more is refused before memory is taken


class Splits(NamedTuple):
    """Images as bytes (samples, height, width[, colours]) and classes 0 to 9 (samples,), to train and to test on."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def check_header(key: str, shape: tuple[int, ...], dtype: np.dtype, image: tuple[int, ...], source: str) -> None:
    """Refuse an array by its shape and type alone.

    key: one of the fields of `Splits`; image: shape of one image, (height, width) or (height, width, colours).

    Raises:
        GradlabError: for objects, a wrong type or shape, no images, or more than MAX_IMAGES.
    """
    images = key.startswith("x")
    kind = dtype == np.uint8 if images else dtype.kind in "iu"
    expected = f"uint8 of shape (samples, {', '.join(map(str, image))})" if images else "integers of shape (samples,)"
    if dtype.hasobject or not kind or len(shape) < 1 or shape[1:] != (image if images else ()):
        raise GradlabError(f"{source}: {key} is {dtype} of shape {shape}, expected {expected}")
    if not 1 <= shape[0] <= MAX_IMAGES:
        raise GradlabError(f"{source}: {key} holds {shape[0]} samples, expected 1 to {MAX_IMAGES}")


def checked(splits: Splits, image: tuple[int, ...], source: str) -> Splits:
    """The same arrays, labels as int64, once they are known to fit each other; image: the shape of one.

    Raises:
        GradlabError: for a wrong type or shape, a label outside 0 to 9, or labels that do not match the images.
    """
    for key, array in splits._asdict().items():
        check_header(key, array.shape, array.dtype, image, source)
    for split in ("train", "test"):
        images, labels = getattr(splits, f"x_{split}"), getattr(splits, f"y_{split}")
        if len(images) != len(labels):
            raise GradlabError(f"{source}: {len(images)} {split} images but {len(labels)} labels")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= CLASSES:
            raise GradlabError(f"{source}: y_{split} runs from {low} to {high}, expected 0 to {CLASSES - 1}")
    return splits._replace(
        y_train=splits.y_train.astype(np.int64, copy=False), y_test=splits.y_test.astype(np.int64, copy=False)
    )


def reason(error: Exception) -> str:
    """The start of an error's first line: libraries' messages can run over many lines, and quote the file."""
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
