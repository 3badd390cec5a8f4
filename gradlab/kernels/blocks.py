"""Numbers of blocks of a vector, such as scales: which block an element lies in, and reductions over blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.kernels import Source, launch

CHUNK, _TOGETHER = 4096, 1024  # elements that a program reduces at most, and of several small blocks
TILE = 1024  # elements that a program encodes
_OF_A_TOP = 8192  # elements of several small blocks where their largest is kept too, of which there are to be few


@dataclass(frozen=True)
class BlockTable:
    """Places of the blocks of a vector (numel,), on a device.

    size: elements of all blocks but the last; 0: `starts` says.
    widest: size of the largest chunk.
    count: number of blocks.
    whole: whether each block is a chunk.
    starts: first elements, and the vector's end, (blocks + 1,), int64.
    chunks: beginnings of runs of at most `CHUNK` elements that lie in one block, and the vector's end, int64.
    of_blocks: first chunk of each block, and the number of chunks, (blocks + 1,), int64.
    tiles: beginnings of runs of at most `TILE` elements of whole blocks, and the vector's end; and the block that each
        begins with, (2, tiles + 1), int64. They lie at multiples of `aligned`, and all blocks but a tile's last have
        `widest` elements, a power of two. None: there are no such runs.
    aligned: 8 or 16.
    """

    numel: int
    size: int
    widest: int
    count: int
    whole: bool
    starts: torch.Tensor
    chunks: torch.Tensor
    of_blocks: torch.Tensor
    tiles: torch.Tensor | None = None
    aligned: int = 8

    @property
    def steps(self) -> int:
        """Steps of a search for an element's block."""
        return self.count.bit_length()


def table_of(size: int, starts: np.ndarray | None, numel: int, device: torch.device) -> BlockTable:
    """Bring the places of a vector's blocks to a device: of one size, or from `starts` and the end, (blocks + 1,)."""
    size = 0 if starts is not None else min(size, max(1, numel))
    edges = np.append(np.arange(0, numel, size), numel) if starts is None else starts
    counts = -(-np.diff(edges) // CHUNK)
    firsts = np.append(0, np.cumsum(counts))
    within = np.arange(firsts[-1]) - np.repeat(firsts[:-1], counts)
    chunks = np.append(np.repeat(edges[:-1], counts) + within * CHUNK, numel)
    widest = int(np.diff(chunks).max(initial=1))
    starts_on, chunks_on, of_blocks = (torch.from_numpy(one).to(device) for one in (edges, chunks, firsts))
    tiles = tiles_of(edges)
    aligned = 16 if tiles is not None and not (tiles[0, :-1] % 16).any() else 8
    tiles_on, whole = None if tiles is None else torch.from_numpy(tiles).to(device), bool((counts == 1).all())
    places = (starts_on, chunks_on, of_blocks, tiles_on)
    return BlockTable(numel, size, widest, len(edges) - 1, whole, *places, aligned)


def tiles_of(edges: np.ndarray) -> np.ndarray | None:
    """Return `BlockTable.tiles` of blocks with these edges, (blocks + 1,)."""
    sizes = np.diff(edges)
    size = int(sizes.max(initial=0))
    if not 0 < size <= TILE or size & (size - 1):
        return None
    ends = np.append(np.flatnonzero(sizes < size) + 1, len(sizes))  # of runs of blocks, of which the last is smaller
    starts = np.append(0, ends[:-1])
    counts = -(-(ends - starts) * size // TILE)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    blocks = np.append(np.repeat(starts, counts) + within * (TILE // size), len(sizes))
    tiles = np.stack([edges[blocks], blocks])
    return None if (tiles[0, :-1] % 8).any() else tiles


def table_of_elements(vector: torch.Tensor) -> BlockTable:
    """Return the places of blocks of one element each, without a list of them."""
    starts, chunks, of_blocks = vector.new_empty(3, 0, dtype=torch.int64).unbind()
    return BlockTable(vector.numel(), 1, 1, vector.numel(), True, starts, chunks, of_blocks)


@triton.jit
def block_at(i, starts, count, steps, SIZE: tl.constexpr):
    """Return the block of each element: the last one that begins at it or before."""
    if SIZE > 0:
        low = i // SIZE
    else:
        low = i * 0
        high = low + count - 1
        for _ in range(steps):
            middle = (low + high + 1) // 2
            right = tl.load(starts + middle) <= i
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle - 1)
    return low


@triton.jit
def magnitude_bits(x):
    """Return |x| as a whole number that orders as magnitudes do, NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def of_largest(x, inside):
    largest = tl.max(tl.where(inside, magnitude_bits(x), 0), 1).to(tl.float64)
    return largest, largest, largest


@triton.jit
def of_magnitudes(x, inside):
    total = tl.sum(tl.where(inside, tl.abs(x), 0.0).to(tl.float64), 1)
    return total, total, total


@triton.jit
def of_squares(x, inside):
    wide = tl.where(inside, x, 0.0).to(tl.float64)
    total = tl.sum(wide * wide, 1)
    return total, total, total


@triton.jit
def of_signs(x, inside):
    wide = tl.where(inside, x, 0.0).to(tl.float64)
    count = tl.sum((inside & (x >= 0)).to(tl.int32), 1).to(tl.float64)
    # NaN is in both sums, as it is neither.
    return tl.sum(tl.where(x < 0, 0.0, wide), 1), tl.sum(tl.where(x > 0, 0.0, wide), 1), count


@triton.jit
def of_largest_and_squares(x, inside):
    largest, _, _ = of_largest(x, inside)
    total, _, _ = of_squares(x, inside)
    return largest, total, total


@triton.jit
def of_halves(x, inside):
    """Return the Euclidean norm of rows, whose sums are by halves."""
    bits = tl.max(tl.where(inside, magnitude_bits(x), 0), 1)
    largest = bits.to(tl.float32, bitcast=True)
    x = tl.div_rn(x, tl.where(largest == 0.0, 1.0, largest)[:, None])
    x = tl.where(inside, x * x, 0.0)
    for _ in tl.static_range(12):  # a chunk's
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1)
    norm = (largest * tl.sqrt(tl.sum(x, 1).to(tl.float64)).to(tl.float32)).to(tl.float64)
    return norm, norm, norm


@triton.jit
def by_halves(sizes, LOG: tl.constexpr):
    """Return places (rows, 2^LOG) in rows of these sizes, (rows,), and whether a place is in its row: their sums by
    halves are those of the rows alone."""
    size = sizes[:, None]
    p = tl.arange(0, 2**LOG)[None, :] + size * 0
    i = p * 0
    inside = i < size
    for bit in tl.static_range(LOG):
        i += ((p >> bit) & 1) * ((size + (2 ** (LOG - bit) - 1)) >> (LOG - bit))
        inside = inside & (i < (size + (2 ** (LOG - bit - 1) - 1)) >> (LOG - bit - 1))
    return i, inside


@triton.jit
def one(a, b, c, size, over):
    found = a.to(tl.float32)
    return found, found


@triton.jit
def clipped(a, b, c, size, over):
    largest, _ = largest_over(a, b, c, size, 1.0)
    limit = tl.sqrt(b / size).to(tl.float32) * over
    least = tl.where((limit > 0.0) & (limit < largest), limit, largest)
    return least, least


@triton.jit
def largest_over(a, b, c, size, over):
    largest = tl.div_rn(a.to(tl.int32).to(tl.float32, bitcast=True), over)
    return largest, largest


@triton.jit
def mean(a, b, c, size, over):
    found = (a / size).to(tl.float32)
    return found, found


@triton.jit
def root_mean(a, b, c, size, over):
    found = tl.sqrt(a / size).to(tl.float32)
    return found, found


@triton.jit
def two_means(a, b, c, size, over):
    return (a / tl.maximum(c, 1.0)).to(tl.float32), (b / tl.maximum(size - c, 1.0)).to(tl.float32)


@triton.jit
def _of_chunks(
    x, y, chunks, out, count, over,
    ADD: tl.constexpr, TERMS: tl.constexpr, FINISH: tl.constexpr, HALVES: tl.constexpr, N: tl.constexpr,
    TOPS: tl.constexpr, ROWS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    some = chunk < count
    start, stop = tl.load(chunks + chunk, mask=some, other=0), tl.load(chunks + chunk + 1, mask=some, other=0)
    if HALVES:
        i, inside = by_halves(stop - start, LOG)
        i += start[:, None]
    else:
        i = start[:, None] + tl.arange(0, 2**LOG)[None, :]
        inside = i < stop[:, None]
    value = tl.load(x + i, mask=inside, other=0.0)
    if ADD:
        value += tl.load(y + i, mask=inside, other=0.0)
    a, b, c = TERMS(value, inside)
    if N == 0:  # chunks' own, to be added up
        tl.store(out + chunk, a, mask=some)
        tl.store(out + count + chunk, b, mask=some)
        tl.store(out + 2 * count + chunk, c, mask=some)
    else:
        first, second = FINISH(a, b, c, (stop - start).to(tl.float64), over)
        tl.store(out + chunk, first, mask=some)
        if N == 2:
            tl.store(out + count + chunk, second, mask=some)
        if TOPS:
            top = tl.max(tl.where(some, magnitude_bits(first), 0), 0).to(tl.float32, bitcast=True)
            tl.store(out + count + tl.program_id(0), top)


@triton.jit
def of_parts(parts, starts, of_blocks, block, chunks, over, LARGEST: tl.constexpr, FINISH: tl.constexpr):
    """Return a block's number, or its two, from what its chunks add up to, float64."""
    begin, last = tl.load(of_blocks + block), tl.load(of_blocks + block + 1)
    a = tl.zeros((1024,), tl.float64)
    b, c = a, a
    for start in range(begin, last, 1024):
        i = start + tl.arange(0, 1024)
        found = tl.load(parts + i, mask=i < last, other=0.0)
        a = tl.maximum(a, found) if LARGEST else a + found
        b += tl.load(parts + chunks + i, mask=i < last, other=0.0)
        c += tl.load(parts + 2 * chunks + i, mask=i < last, other=0.0)
    size = (tl.load(starts + block + 1) - tl.load(starts + block)).to(tl.float64)
    total = tl.max(a) if LARGEST else tl.sum(a)
    return FINISH(total, tl.sum(b), tl.sum(c), size, over)


@triton.jit
def _of_blocks(
    parts, starts, of_blocks, out, count, chunks, over, LARGEST: tl.constexpr, FINISH: tl.constexpr, N: tl.constexpr
):
    block = tl.program_id(0)
    first, second = of_parts(parts, starts, of_blocks, block, chunks, over, LARGEST, FINISH)
    tl.store(out + block, first)
    if N == 2:
        tl.store(out + count + block, second)


REDUCTIONS: dict[str, tuple[Any, Any, int]] = {
    "largest": (of_largest, largest_over, 1),
    "mean magnitude": (of_magnitudes, mean, 1),
    "root mean square": (of_squares, root_mean, 1),
    "two means": (of_signs, two_means, 2),
    "clipped": (of_largest_and_squares, clipped, 1),
    "norm": (of_halves, one, 1),
}


def reduced(
    source: Source, table: BlockTable, kind: str, over: float = 1.0, tops: bool = False, later: bool = False
) -> torch.Tensor | None:
    """Reduce each block of a vector or a sum (numel,) to a number or two, (blocks,) or (2, blocks), float32.

    kind: "largest" magnitude, divided by `over`, "mean magnitude", "root mean square", "two means", of elements from 0
        on and of those below, "clipped": the largest magnitude, or `over` root mean squares if less, or "norm", the
        Euclidean one by halves. None is returned for that of blocks larger than a chunk.
    tops: whether the largest numbers of runs of chunks follow the "largest" of blocks that are chunks.
    later: whether `of_parts` makes numbers of blocks later, where some are larger than a chunk: what chunks add up to
        is returned, (3, chunks), float64.
    """
    (terms, finish, n), (vector, addend, _) = REDUCTIONS[kind], source
    chunks, log = len(table.chunks) - 1, (table.widest - 1).bit_length()
    rows, halves = max(1, (_OF_A_TOP if tops else _TOGETHER) >> log), kind == "norm"
    if (halves or tops) and not table.whole:
        return None
    programs = triton.cdiv(chunks, rows)
    out = vector.new_empty(n * table.count + (programs if tops else 0))
    constants = {"TERMS": terms, "FINISH": finish, "HALVES": halves, "TOPS": tops, "ROWS": rows, "LOG": log}
    constants["ADD"] = addend is not None
    both = vector, vector if addend is None else addend
    if table.whole:
        launch(_of_chunks, programs, *both, table.chunks, out, chunks, over, **constants, N=n)
    else:
        parts = vector.new_empty(3, chunks, dtype=torch.float64)
        launch(_of_chunks, programs, *both, table.chunks, parts, chunks, over, **constants, N=0)
        if later:
            return parts
        given = (parts, table.starts, table.of_blocks, out, table.count, chunks, over)
        launch(_of_blocks, table.count, *given, LARGEST=kind in ("largest", "clipped"), FINISH=finish, N=n)
    return out.view(n, -1) if n > 1 else out
