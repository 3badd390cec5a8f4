"""1-bit SGD: one bit per value, and for each column of a weight matrix the two values that the bits stand for.

Seide, Fu, Droppo, Li, Yu, "1-bit stochastic gradient descent and its application to data-parallel distributed training
of speech DNNs", Interspeech 2014, section 3.2 (quantization with error feedback), 3.2.1 (two values per column) and
3.3 (aggregation in stripes: here the wrapper `two_way`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradlab.codec import About, Guarantees, PlanDefaults, Table
from gradlab.codec.batch import stacks_apart
from gradlab.codec.blocks import WHOLE
from gradlab.codec.blockwise import CACHED, BlockCompressor, Reduction
from gradlab.codec.routes import PAIRS_OF_BLOCKS, Kind
from gradlab.codecs.sign import pack_signs, write_signs
from gradlab.coding.bits import packed_bytes
from gradlab.kernels import Form, Source
from gradlab.layout import Layer

_LEAST = 16  # weights into a unit that are worth two values of their own


class OneBit(BlockCompressor):
    """C(v)_i = mean of the block's elements >= 0 where v_i >= 0, mean of those < 0 elsewhere (threshold 0).

    The two means minimise the block's squared error for these bits. A block is a row of PyTorch's weight, the weights
    into one unit: the paper's column of W; of a transposed weight (inputs, outputs) a row holds the weights out of one
    input. A vector, and a layer with fewer than 16 such weights, is one block. An expert stack has rows for each
    expert. Error feedback is assumed. The paper compresses both ways, stripe by stripe.

    delta-approximate with delta = min_b 1 / d_b for blocks b of d_b elements:
    ||C(v) - v||^2 = ||v||^2 - ||C(v)||^2, and ||C(v_b)||^2 >= ||v_b||_1^2 / d_b >= ||v_b||_2^2 / d_b.

    >>> done = codecs.make("one_bit").apply(torch.tensor([1.0, -3.0, 2.0, -1.0]))
    >>> done.decoded.tolist()
    [1.5, -2.0, 1.5, -2.0]
    >>> done
    Applied(9 bytes instead of 16, or 8 in 16 bits, relative error 0.408)
    """

    name = "one_bit"
    about = About(
        "quantization",
        "8 * blocks + ceil(n / 8)",
        "Seide et al., Interspeech 2014",
        candidates=({},),
        defaults=PlanDefaults(two_way=True),
    )

    @dataclass(frozen=True)
    class Settings:
        pass

    def for_layers(self, layers: Sequence[Layer]) -> OneBit:
        return super().for_layers(stacks_apart(Table.of(layers)))

    def block_of(self, layer: Layer) -> int:
        inputs = math.prod(layer.shape[1:]) if len(layer.shape) > 1 else 0
        return inputs if inputs >= _LEAST else WHOLE

    def guarantees(self, layers: Sequence[Layer]) -> Guarantees:
        lengths = [min(layer.numel, self.block_of(layer)) for layer in stacks_apart(Table.of(layers))]
        return Guarantees(delta=1 / max([1, *lengths]))

    def compress(self, vector: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Return means (2 * blocks,), float32, and signs (ceil(numel / 8),), uint8. The means of all blocks' elements
        >= 0 come first, then those of elements < 0."""
        if not vector.numel():
            return vector.new_empty(0, dtype=torch.float32), pack_signs(vector)
        if (done := self.compressed_by_kernels(Source(vector), generator)) is not None:
            return done
        return self.reduced(vector, TWO_MEANS).reshape(-1), pack_signs(vector)

    def compress_source(self, source: Source, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return self.reduced_and_encoded(source, TWO_MEANS.kernel, source)

    def form(self) -> Form:
        return Form("one_bit", 1)

    def kinds(self) -> tuple[Kind, ...]:
        return (PAIRS_OF_BLOCKS, 1)

    def prepared(self, payload: Sequence[torch.Tensor], like: torch.Tensor, scale: float) -> Any:
        means, packed = payload
        above, below = means.to(like.dtype).view(2, -1)
        # sign * half the distance + the middle
        above, below = above * (scale / 2), below * (scale / 2)  # halved first: their sum may be too large
        return packed, above - below, above + below

    def fill(self, values: torch.Tensor, prepared: Any, start: int) -> torch.Tensor:
        packed, half, middle = prepared
        write_signs(values, packed[start // 8 : -(-(start + values.numel()) // 8)], 1.0)
        return self.shift(self.scale(values, half, start), middle, start)

    def compressed_bytes(self, numel: int) -> int:
        return 8 * self.blocks.count(numel) + packed_bytes(numel, 1)


def two_means(rows: torch.Tensor) -> torch.Tensor:
    """Average each row's elements >= 0 and those < 0, 0 where there are none: (m, n) -> (2, m), float32. numpy's order
    of addition follows from the length; torch's sums depend on the row's address."""
    if rows.device.type != "cpu":
        above, count = rows.clamp(min=0).sum(1, dtype=torch.float64), (rows >= 0).sum(1)
        below = rows.clamp(max=0).sum(1, dtype=torch.float64)
    else:
        above, below, count = map(torch.from_numpy, _sums(rows.numpy()))
    others = (rows.shape[1] - count).clamp(min=1)
    return torch.stack([above / count.clamp(min=1), below / others]).float()


def two_means_of_blocks(values: torch.Tensor, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Average each block's elements >= 0 and those < 0, for `BlockCompressor.reduced`: (n,), (m,), (m,) -> (2, m)."""
    count = np.add.reduceat(values.numpy() >= 0, starts, dtype=np.int64)
    # torch's minimum and maximum take a quarter of the time of numpy's. A sum of nothing but -0 is 0.
    means, part = np.empty((2, len(starts)), np.float32), values.clamp(min=0)
    with np.errstate(over="ignore", invalid="ignore"):
        above = np.add.reduceat(part.numpy(), starts, dtype=np.float64)
        below = np.add.reduceat(torch.clamp(values, max=0, out=part).numpy(), starts, dtype=np.float64)
        above += 0.0
        below += 0.0
        np.divide(above, np.maximum(count, 1), out=means[0], casting="same_kind")
        np.divide(below, np.maximum(sizes - count, 1), out=means[1], casting="same_kind")
    return means


TWO_MEANS = Reduction(two_means, two_means_of_blocks, "two means")


def _sums(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Add up each row's elements >= 0 and those < 0, float64, and count the former."""
    above, below, count = _sums_in(rows, rows.dtype)
    if not (np.isfinite(above).all() and np.isfinite(below).all()):  # a sum of finite numbers may be too large
        return _sums_in(rows, np.dtype(np.float64))
    return above, below, count


def _sums_in(rows: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    above, below, count = np.zeros(len(rows)), np.zeros(len(rows)), np.zeros(len(rows), np.int64)
    width = min(CACHED, rows.shape[1])
    scratch = np.empty((len(rows), width), rows.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, rows.shape[1], width):
            piece = rows[:, start : start + width]
            room = scratch[:, : piece.shape[1]]
            above += np.maximum(piece, 0, out=room).sum(1, dtype=dtype)
            below += np.minimum(piece, 0, out=room).sum(1, dtype=dtype)
            count += np.count_nonzero(piece >= 0, axis=1)
    return above, below, count
