"""The largest coefficients of the discrete cosine transform of each chunk of matrices, and sums of several ranks' ones.

Coefficients differ from PyTorch's in their last bits, as sums of products have another order. Indices ascend in each
chunk. Among equal magnitudes the first ones are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from gradlab.kernels import launch
from gradlab.kernels.blocks import magnitude_bits
from gradlab.kernels.codes import rows_of
from gradlab.kernels.selection import _get, _put


@dataclass(frozen=True)
class Chunks:
    """The chunks (h, w) of the matrices that a vector has, on a device.

    rows: each matrix's start, columns, chunks along a row, h, w, first chunk, coefficients sent of a chunk, place of
        the values of its class, first byte of its class, coefficients in the class before its own, those of the class,
        bits of an index, and places of the cosines of h and of w, (matrices, 14), int64.
    of_chunks: the matrix of each chunk, (chunks,), int64.
    cosines: matrices of all sizes, one after another, float32.
    side: elements of a side at most, a power of two.
    most: coefficients sent of a chunk at most.
    """

    rows: torch.Tensor
    of_chunks: torch.Tensor
    cosines: torch.Tensor
    side: int
    most: int


def chunks_of(rows: Sequence[Sequence[int]], counts: Sequence[int], cosines: torch.Tensor, side: int) -> Chunks:
    """Bring rows of `Chunks`, and the number of chunks of each, to the device of the cosines."""
    device, most = cosines.device, max((row[6] for row in rows), default=0)
    of_chunks = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 14)
    return Chunks(table.to(device), of_chunks.to(device), cosines, max(16, triton.next_power_of_2(side)), most)


@triton.jit
def _cosines(cosines, first, size, TURNED: tl.constexpr, SIDE: tl.constexpr):
    a, b = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    at = b * size + a if TURNED else a * size + b
    return tl.load(cosines + first + at, mask=(a < size) & (b < size), other=0.0)


@triton.jit
def _chunk(rows, of_chunks, SIDE: tl.constexpr):
    """Return the chunk's row, where its elements lie, whether these are there, its columns, and its number."""
    row = rows + 14 * tl.load(of_chunks + tl.program_id(0))
    columns, along, h, w = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    n = tl.program_id(0) - tl.load(row + 5)
    corner = tl.load(row) + n // along * h * columns + n % along * w
    i, j = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    return row, corner, i * columns + j, (i < h) & (j < w), h, w, columns, n


@triton.jit
def _coding(row, n):
    kept, base = tl.load(row + 6), tl.load(row + 9)
    return kept, tl.load(row + 7), tl.load(row + 8), base + n * kept, tl.load(row + 10), tl.load(row + 11)


@triton.jit
def _largest(x, cosines, rows, of_chunks, values, octets, words, SIDE: tl.constexpr):
    row, corner, places, inside, h, w, _, n = _chunk(rows, of_chunks, SIDE)
    kept, of_values, first, base, of_class, width = _coding(row, n)
    chunk = tl.load(x + corner + places, mask=inside, other=0.0)
    down = _cosines(cosines, tl.load(row + 12), h, False, SIDE)
    across = _cosines(cosines, tl.load(row + 13), w, True, SIDE)
    found = tl.dot(tl.dot(down, chunk, input_precision="ieee"), across, input_precision="ieee")
    value = tl.reshape(found, (SIDE * SIDE,))
    at = tl.arange(0, SIDE * SIDE)
    i, j = at // SIDE, at % SIDE
    key = tl.where((i < h) & (j < w), magnitude_bits(value), -1)
    limit = (kept * 0).to(tl.int32)
    for b in range(31):
        higher = limit | (1 << (30 - b))
        limit = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= kept, higher, limit)
    same = (key == limit).to(tl.int32)
    above = tl.sum((key > limit).to(tl.int32), 0)
    chosen = (key > limit) | ((same > 0) & (tl.cumsum(same, 0) <= kept - above))
    slot = base + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(values + of_values + slot, value, mask=chosen)
    _put(octets, words, first, slot, i * w + j, of_class, width, 1, chosen)


@triton.jit
def _restore(
    out, summed, senders, values, octets, cosines, rows, of_chunks, ranks, value_stride, stride, scale, over,
    ADD: tl.constexpr, SENDERS: tl.constexpr, COUNT: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    row, corner, places, inside, h, w, columns, n = _chunk(rows, of_chunks, SIDE)
    kept, of_values, first, base, of_class, width = _coding(row, n)
    places += corner
    nothing = tl.zeros((SIDE, SIDE), tl.float32)
    tl.store(summed + places, nothing, mask=inside)
    if SENDERS:
        tl.store(senders + places, nothing, mask=inside)
    j = tl.arange(0, COUNT)
    some, slot = j < kept, base + j
    for _ in range(ranks):
        tl.debug_barrier()  # all that the rank before has written is there
        index = tl.where(width == 0, j, _get(octets, first, slot, of_class, width, 1, some))
        index = tl.minimum(index, h * w - 1)
        at = corner + index // w * columns + index % w
        total = tl.load(summed + at, mask=some, other=0.0)
        tl.store(summed + at, total + tl.load(values + of_values + slot, mask=some, other=0.0), mask=some)
        if SENDERS:
            tl.store(senders + at, tl.load(senders + at, mask=some, other=0.0) + 1.0, mask=some)
        octets += stride
        values += value_stride
    tl.debug_barrier()
    total = tl.load(summed + places, mask=inside, other=0.0)
    if SENDERS:
        sent = tl.load(senders + places, mask=inside, other=1.0)
        total = total * (tl.div_rn(nothing + 1.0, tl.maximum(sent, 1.0)) * over)
    else:
        total = total * scale
    down = _cosines(cosines, tl.load(row + 12), h, True, SIDE)
    across = _cosines(cosines, tl.load(row + 13), w, False, SIDE)
    found = tl.dot(tl.dot(down, total, input_precision="ieee"), across, input_precision="ieee")
    tl.debug_barrier()  # all has been read
    if ADD:
        found += tl.load(out + places, mask=inside, other=0.0)
    tl.store(out + places, found, mask=inside)


def largest_coefficients(
    vector: torch.Tensor, chunks: Chunks, count: int, nbytes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the largest coefficients of each chunk of a vector (numel,): values (count,) and coded indices, uint8."""
    words = vector.new_zeros(-(-nbytes // 4) + 1, dtype=torch.int32)
    octets, values = words.view(torch.uint8), vector.new_empty(count)
    given = (vector, chunks.cosines, chunks.rows, chunks.of_chunks, values, octets, words)
    launch(_largest, len(chunks.of_chunks), *given, SIDE=chunks.side)
    return values, octets[:nbytes]


def restore_coefficients(
    out: torch.Tensor,
    payloads: Sequence[Sequence[torch.Tensor]],
    chunks: Chunks,
    scale: float,
    add: bool,
    of_senders: bool,
) -> None:
    """Write what the sum of coefficients of several ranks stands for, in their order, times a factor, to a vector
    (numel,).

    add: whether it is added to what `out` has.
    of_senders: whether a coefficient's mean is over the ranks that sent it, times the factor and the number of ranks.
    """
    (values, value_stride), (octets, stride) = map(rows_of, zip(*payloads, strict=True))
    ranks = len(payloads)
    summed, senders = torch.empty_like(out) if add else out, torch.empty_like(out) if of_senders else out
    given = (out, summed, senders, values, octets, chunks.cosines, chunks.rows, chunks.of_chunks)
    constants = {"ADD": add, "SENDERS": of_senders, "COUNT": triton.next_power_of_2(max(1, chunks.most))}
    sizes = (ranks, value_stride, stride, scale, scale * ranks)
    launch(_restore, len(chunks.of_chunks), *given, *sizes, **constants, SIDE=chunks.side)
