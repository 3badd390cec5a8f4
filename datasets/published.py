"""Whether a data set's arrays are the published ones, by SHA-256, in whatever form they came.

CIFAR-10: of the files of https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz. Fashion-MNIST: of the unpacked IDX
files of https://github.com/zalandoresearch/fashion-mnist. Arrays of other forms are written as these files would have
them. Somebody's own images have other numbers of samples, and nothing is said of them.
"""

from __future__ import annotations

import hashlib
import struct
import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from gradlab.datasets.splits import Splits

CIFAR10 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
FASHION_MNIST = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_BATCH = 10_000  # images of a file of CIFAR-10


def cifar10_files(splits: Splits) -> Iterator[bytes]:
    """Yield the six files of the binary form: a byte of the class and 3072 of the image's colour planes per record."""
    for images, labels in ((splits.x_train, splits.y_train), (splits.x_test, splits.y_test)):
        for start in range(0, len(images), _BATCH):
            some = slice(start, start + _BATCH)
            planes = images[some].transpose(0, 3, 1, 2).reshape(len(images[some]), -1)
            yield np.concatenate([labels[some, None].astype(np.uint8), planes], axis=1).tobytes()


def fashion_mnist_files(splits: Splits) -> Iterator[bytes]:
    """Yield the four unpacked IDX files."""
    for array in splits:
        header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        yield header + array.astype(np.uint8).tobytes()


def others(splits: Splits, known: Mapping[str, str], files: Iterator[bytes], counts: tuple[int, int]) -> list[str]:
    """List the published files that the arrays differ from.

    Args:
        splits: the arrays.
        known: SHA-256 by name, `CIFAR10` or `FASHION_MNIST`.
        files: the arrays as these files.
        counts: images to train and to test on in the published set.

    Returns:
        Names; none too for arrays of other numbers of images.
    """
    if (len(splits.x_train), len(splits.x_test)) != counts:
        return []
    pairs = zip(known.items(), files, strict=True)
    return [name for (name, digest), content in pairs if hashlib.sha256(content).hexdigest() != digest]


def tell(source: str, differ: list[str]) -> None:
    """Warn of what `others` found."""
    if differ:
        named = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "")
        warnings.warn(
            f"gradlab: {source}: as many images as the published set has, but not the same (by SHA-256, {named}): a "
            "damaged copy, or images that were changed, as by another compression",
            stacklevel=4,
        )
