"""Elements of many layers rounded by one launch, where each layer has its own random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.kernels import launch
from gradlab.kernels.blocks import CHUNK, BlockTable, block_at, table_of
from gradlab.kernels.codes import lanes_of, philox
from gradlab.kernels.formats import HALF


class LayerTable(NamedTuple):
    """Places of layers in a vector, and the first of each one's random words, (layers,), int64."""

    blocks: BlockTable
    words: torch.Tensor


def layers_of(numels: tuple[int, ...], device: torch.device, empty: int = 0) -> LayerTable:
    """Bring the places of layers with so many elements, one after another, to a device.

    empty: random words that a layer without elements draws.
    """
    edges, words = np.cumsum((0, *numels)), np.cumsum([0, *(-(-numel // 4) or empty for numel in numels[:-1])])
    return LayerTable(table_of(0, edges, int(edges[-1]), device), torch.from_numpy(words).to(device))


@triton.jit
def whole(value, number, drawn, most, RANDOM: tl.constexpr):
    """Round value * number to a whole number of at most `most`; NaN becomes 0."""
    x = value * number
    if RANDOM:
        x = tl.floor(x + drawn.to(tl.float32) * 2.0**-16 + HALF)
    else:
        below = tl.floor(x)
        odd = tl.floor(below * 0.5) * 2.0 != below
        x = tl.where((x - below > 0.5) | ((x - below == 0.5) & odd), below + 1.0, below)
    x = tl.where(x < -most, -most, tl.where(x > most, most, x))
    return tl.where(x == x, x, 0.0).to(tl.int32)


@triton.jit
def bfloat16(value, number, drawn, most, RANDOM: tl.constexpr):
    """Return the upper half of value's bits, after a random number was added to the lower one."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    quiet = tl.where(magnitude > 0x7F800000, 64, 0)  # NaN stays one, whatever is cut off
    return tl.where(magnitude >= 0x7F800000, (bits >> 16) | quiet, (bits + drawn + 2**15) >> 16)


@triton.jit
def _round(
    x, numbers, chunks, starts, words, out, count, steps, seed, most,
    CODE: tl.constexpr, RANDOM: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    start, stop = tl.load(chunks + tl.program_id(0)), tl.load(chunks + tl.program_id(0) + 1)
    layer = block_at(start, starts, count, steps, 0)
    i = start + tl.arange(0, TILE)
    inside = i < stop
    word = tl.load(words + layer) + (start - tl.load(starts + layer)) // 4 + tl.arange(0, TILE // 4)
    number = tl.load(numbers + layer) if N else 1.0
    drawn = i.to(tl.int32)
    if RANDOM:
        a, b, c, d = philox(seed, word // 4)
        place = word % 4
        drawn = lanes_of(tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d)), TILE)
    code = CODE(tl.load(x + i, mask=inside, other=0.0), number, drawn, most, RANDOM)
    tl.store(out + i, code.to(out.dtype.element_ty), mask=inside)


def rounded(
    vector: torch.Tensor, layers: LayerTable, code: Any, out: torch.Tensor, seed: int | None,
    numbers: torch.Tensor | None = None, most: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Write the code, `whole` or `bfloat16`, of each element of a vector (numel,), of whole numbers of `out`'s dtype.

    seed: the key of random numbers; None: it rounds to the nearest.
    numbers: a factor for each layer, (layers,), float32.
    """
    table = layers.blocks
    given = (vector, vector if numbers is None else numbers, table.chunks, table.starts, layers.words, out)
    constants = {"CODE": code, "RANDOM": seed is not None, "N": numbers is not None, "TILE": CHUNK}
    launch(_round, len(table.chunks) - 1, *given, table.count, table.steps, seed or 0, most, **constants)
    return out
