"""Products of several matrices with their thin factors, and orthonormal factors, each by one launch for all matrices.

Factors are rows: P^T (r, n) and Q^T (r, m) of a matrix (n, m). Those of all matrices are one vector, and so are the
matrices. Sums run in another order than a BLAS's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.kernels import launch

_WIDE = tl.constexpr(128)  # neighbours in memory that a program reads at once
_ROWS = tl.constexpr(16)  # rows of a matrix that a program writes
_LINE = tl.constexpr(1024)  # elements of a row that a program reads at once
_SUMMED = 1024  # elements of a factor's row that one program sums over or works on
_FIELDS = tl.constexpr(9)  # of a matrix in `Side.table`
# |x - its projection|^2 / |x|^2 of a row below which it counts as dependent: more than is left by float32's rounding.
_DEPENDENT = tl.constexpr(1e-10)


class Matrix(NamedTuple):
    """A matrix (n, m) in a vector. offset: of its first element. rank: r of its factors. scale: see `unit_rows`."""

    offset: int
    n: int
    m: int
    rank: int
    scale: float = 1.0


class Side(NamedTuple):
    """The way to one factor of each matrix, the out-factor, from the other one, the in-factor.

    size: elements of all out-factors. partial: elements of their partial sums, as many if no sum is in parts.
    summed: elements that a partial sum is over.
    table: int64 (matrices, 9): offset of the matrix, lengths of rows of the in-factor and the out-factor, r, offsets of
        the in-factor, the out-factor and the partial sums, first of its parts in `parts`, bits of its scale.
    products, parts, lines, sums: programs of the kernels, int64 (programs, 3): number of a matrix, and two beginnings.
    """

    size: int
    partial: int
    summed: int
    table: torch.Tensor
    products: torch.Tensor
    parts: torch.Tensor
    lines: torch.Tensor
    sums: torch.Tensor


class LowRank:
    """Work on the factors of matrices that lie in one vector. right: whether Q^T is meant, else P^T."""

    def __init__(self, matrices: Sequence[Matrix], device: torch.device) -> None:
        self._rank = triton.next_power_of_2(max(matrix.rank for matrix in matrices))
        few, wide = _few(self._rank), _WIDE.value
        n, m, rank, scale = zip(*(matrix[1:] for matrix in matrices), strict=True)
        offsets = [matrix.offset for matrix in matrices]
        self._sides = (
            self._side(offsets, m, n, rank, scale, (few, 2**30), device),
            self._side(offsets, n, m, rank, scale, (wide, _SUMMED), device),
        )
        self._tiles = _blocks(zip(n, m, strict=True), (_ROWS.value, wide), device)

    @staticmethod
    def _side(
        offsets: Sequence[int],
        inner: Sequence[int],
        outer: Sequence[int],
        rank: Sequence[int],
        scale: Sequence[float],
        steps: tuple[int, int],
        device: torch.device,
    ) -> Side:
        of_in, of_out = ([r * side for r, side in zip(rank, sides, strict=True)] for sides in (inner, outer))
        pieces = [-(-side // steps[1]) for side in inner]
        partial = [size * count for size, count in zip(of_out, pieces, strict=True)]
        parts = [-(-side // _SUMMED) for side in outer]
        firsts = ([0, *accumulate(sizes)] for sizes in (of_in, of_out, partial, parts))
        columns = [offsets, inner, outer, rank, *(first[:-1] for first in firsts)]
        columns.append(np.array(scale, np.float32).view(np.int32).tolist())
        return Side(
            sum(of_out),
            sum(partial),
            steps[1],
            torch.tensor(columns, dtype=torch.int64).T.contiguous().to(device),
            _blocks(zip(outer, inner, strict=True), steps, device),
            _blocks(((side, 1) for side in outer), (_SUMMED, 1), device),
            _blocks(((r, 1) for r in rank), (1, 1), device),
            _blocks(((size, 1) for size in of_out), (_LINE.value, 1), device),
        )

    def multiplied(
        self, vector: torch.Tensor, factors: torch.Tensor, right: bool, *, unit: bool = False
    ) -> torch.Tensor:
        """Compute the factors of a side from the other side's: P^T = Q^T M^T, or Q^T = P^T M.

        vector: has the matrices. unit: whether the given factors' rows are scaled to a largest magnitude of 1 before.
        """
        of = self._sides[right]
        found = vector.new_empty(of.partial)
        constants = {"RANK": self._rank, "TURNED": right, "UNIT": unit, "SUMMED": of.summed}
        launch(_product, len(of.products), vector, factors, found, of.table, of.products, **constants)
        if of.partial == of.size:
            return found
        whole = vector.new_empty(of.size)
        launch(_sum, len(of.sums), found, whole, of.table, of.sums, SUMMED=of.summed)
        return whole

    def orthonormal(self, factors: torch.Tensor, right: bool) -> torch.Tensor:
        """Compute factors with orthonormal rows that span those given. Rows that depend on others are replaced."""
        of, rank = self._sides[right], self._rank
        grams = torch.empty(len(of.parts), 4 * rank * rank, dtype=torch.float64, device=factors.device)
        out = torch.empty_like(factors)
        constants = {"RANK": rank, "TILE": max(8, min(64, 256 // rank)), "SUMMED": _SUMMED}
        launch(_gram, len(of.parts), factors, grams, of.table, of.parts, **constants)
        launch(_orthonormal, len(of.parts), factors, grams, out, of.table, of.parts, **constants)
        return out

    def with_spares(self, factors: torch.Tensor, spares: torch.Tensor, right: bool) -> torch.Tensor:
        """Replace rows of zeros by others."""
        of, out = self._sides[right], torch.empty_like(factors)
        launch(_with_spares, len(of.lines), factors, spares, out, of.table, of.lines)
        return out

    def unit_rows(
        self, factors: torch.Tensor, spares: torch.Tensor, negligible: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale rows of Q^T to length 1; return that times the matrix's scale, with zeros, and as it is, with others,
        for rows that are negligible: whose largest magnitude is at most so much of that of the matrix's rows."""
        of, units, kept = self._sides[True], torch.empty_like(factors), torch.empty_like(factors)
        largest = torch.empty(len(of.lines), dtype=torch.int32, device=factors.device)
        launch(_largest, len(of.lines), factors, largest, of.table, of.lines)
        given = (factors, spares, largest, units, kept, of.table, of.lines, negligible)
        launch(_unit_rows, len(of.lines), *given, RANK=self._rank)
        return units, kept

    def product(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        out: torch.Tensor,
        less_from: torch.Tensor | None = None,
        share: float = 1.0,
    ) -> torch.Tensor:
        """Write P Q^T of all matrices in their places of a vector, or `less_from` less a share of that."""
        given = out if less_from is None else less_from
        table, constants = self._sides[False].table, {"LESS": less_from is not None}
        launch(_outer, len(self._tiles), given, left, right, out, table, self._tiles, share, **constants)
        return out


def _few(rank: int) -> int:
    """Return how many outputs a program computes, or adds up at once, so that its sums fit its registers."""
    return max(2, min(16, 64 // rank))


def _blocks(sizes: Any, steps: tuple[int, int], device: torch.device) -> torch.Tensor:
    """List the blocks of matrices of these sizes, of so many rows and columns: matrix, first row, first column."""
    found = []
    for at, size in enumerate(sizes):
        rows, columns = (np.arange(0, extent, step) for extent, step in zip(size, steps, strict=True))
        firsts = np.stack(np.meshgrid(rows, columns, indexing="ij"), -1).reshape(-1, 2)
        found.append(np.insert(firsts, 0, at, axis=1))
    return torch.from_numpy(np.concatenate(found)).to(device)


@triton.jit
def _program(table, blocks):
    """Return a program's matrix in the table, its number, and its two beginnings."""
    block = blocks + 3 * tl.program_id(0)
    matrix = tl.load(block)
    return table + _FIELDS * matrix, tl.load(block + 1), tl.load(block + 2)


@triton.jit
def _rows(pointer, rank, length, i, RANK: tl.constexpr):
    """Load elements i of all rows of a factor (r, length), float32 (RANK, elements); zero where there are none."""
    k = tl.arange(0, RANK)[:, None]
    return tl.load(pointer + k * length + i[None, :], (k < rank) & (i < length)[None, :], 0.0)


@triton.jit
def _product(
    vector,
    factors,
    found,
    table,
    blocks,
    RANK: tl.constexpr,
    TURNED: tl.constexpr,
    UNIT: tl.constexpr,
    SUMMED: tl.constexpr,
):
    few: tl.constexpr = 16 if RANK <= 4 else 64 // RANK  # `_few`
    OUT: tl.constexpr = _WIDE if TURNED else few
    IN: tl.constexpr = few if TURNED else _WIDE
    of, first, begin = _program(table, blocks)
    inner, outer, rank = tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    matrix, given = vector + tl.load(of), factors + tl.load(of + 4)
    o, i, k = first + tl.arange(0, OUT), tl.arange(0, IN), tl.arange(0, RANK)
    largest = tl.full((RANK, IN), 0.0, tl.float32)
    if UNIT:
        for at in range(0, inner, IN):
            largest = tl.maximum(largest, tl.abs(_rows(given, rank, inner, at + i, RANK)))
    scale = tl.max(largest, 1)[:, None]
    scale = tl.where(scale > 0, scale, 1.0)
    total = tl.full((RANK, OUT, IN), 0.0, tl.float32)
    for at in range(begin, tl.minimum(inner, begin + SUMMED), IN):
        x = _rows(given, rank, inner, at + i, RANK)
        if UNIT:
            x = tl.div_rn(x, tl.broadcast_to(scale, (RANK, IN)))
        inside = (o < outer)[:, None] & (at + i < inner)[None, :]
        places = (at + i)[None, :] * outer + o[:, None] if TURNED else o[:, None] * inner + (at + i)[None, :]
        total += x[:, None, :] * tl.load(matrix + places, inside, 0.0)[None, :, :]
    out = found + tl.load(of + 6) + begin // SUMMED * rank * outer
    tl.store(out + k[:, None] * outer + o[None, :], tl.sum(total, 2), (k < rank)[:, None] & (o < outer)[None, :])


@triton.jit
def _sum(partial, out, table, blocks, SUMMED: tl.constexpr):
    of, first, _ = _program(table, blocks)
    size = tl.load(of + 2) * tl.load(of + 3)
    i = first + tl.arange(0, _LINE)
    parts, inside = partial + tl.load(of + 6), i < size
    total = tl.load(parts + i, inside, 0.0)
    for piece in range(1, tl.cdiv(tl.load(of + 1), SUMMED)):
        total += tl.load(parts + piece * size + i, inside, 0.0)
    tl.store(out + tl.load(of + 5) + i, total, inside)


@triton.jit
def _candidates(pointer, rank, length, i, RANK: tl.constexpr):
    """Return elements i of a factor's rows, and of as many unit vectors that may replace them, float64."""
    c = tl.arange(0, 2 * RANK)[:, None]
    given = tl.load(pointer + c * length + i[None, :], (c < rank) & (i < length)[None, :], 0.0)
    return tl.where(c < RANK, given.to(tl.float64), ((c - RANK) == i[None, :]).to(tl.float64))


@triton.jit
def _gram(factors, grams, table, blocks, RANK: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr):
    """Compute products of all candidates with one another over a part of their elements."""
    of, first, _ = _program(table, blocks)
    length, rank, given = tl.load(of + 2), tl.load(of + 3), factors + tl.load(of + 5)
    c = tl.arange(0, 2 * RANK)
    total = tl.full((2 * RANK, 2 * RANK), 0.0, tl.float64)
    for at in range(first, tl.minimum(length, first + SUMMED), TILE):
        x = _candidates(given, rank, length, at + tl.arange(0, TILE), RANK)
        total += tl.sum(x[:, None, :] * x[None, :, :], 2)
    here = grams + tl.program_id(0).to(tl.int64) * (4 * RANK * RANK)
    tl.store(here + c[:, None] * (2 * RANK) + c[None, :], total)


@triton.jit
def _orthonormal(factors, grams, out, table, blocks, RANK: tl.constexpr, TILE: tl.constexpr, SUMMED: tl.constexpr):
    """Gram-Schmidt, worked out on the products of candidates, which float64 has exactly enough, then applied."""
    of, first, _ = _program(table, blocks)
    length, rank, offset = tl.load(of + 2), tl.load(of + 3), tl.load(of + 5)
    c = tl.arange(0, 2 * RANK)
    row, column = c[:, None], c[None, :]
    places, part = row * (2 * RANK) + column, tl.load(of + 7)
    left = tl.full((2 * RANK, 2 * RANK), 0.0, tl.float64)  # products of what is left of the candidates
    for piece in range(part, part + tl.cdiv(length, SUMMED)):
        left += tl.load(grams + piece * (4 * RANK * RANK) + places)
    before = tl.sum(tl.where(row == column, left, 0.0), 0)
    weights = (row == column).to(tl.float64)  # what is left of each candidate, as a sum of candidates
    basis = tl.full((2 * RANK, 2 * RANK), 0.0, tl.float64)
    for k in range(rank):
        squares = tl.sum(tl.where(row == column, left, 0.0), 0)
        own, was = tl.sum(tl.where(c == k, squares, 0.0)), tl.sum(tl.where(c == k, before, 0.0))
        spare = tl.argmax(tl.where(c >= RANK, squares, -1.0), 0)
        # Rows that are not finite stay, so that whoever looks at the result learns of them.
        chosen = tl.where((own <= _DEPENDENT * was) & (was < float("inf")), spare, k)
        norm = tl.sqrt(tl.sum(tl.where(c == chosen, squares, 0.0)))
        along = tl.sum(tl.where(row == chosen, left, 0.0), 0) / norm
        unit = tl.sum(tl.where(row == chosen, weights, 0.0), 0) / norm
        left -= along[:, None] * along[None, :]
        weights -= along[:, None] * unit[None, :]
        basis = tl.where(row == k, unit[None, :], basis)
    for at in range(first, tl.minimum(length, first + SUMMED), TILE):
        i = at + tl.arange(0, TILE)
        x = _candidates(factors + offset, rank, length, i, RANK)
        y = tl.sum(basis[:, :, None] * x[None, :, :], 1)
        tl.store(out + offset + row * length + i[None, :], y.to(tl.float32), (row < rank) & (i < length)[None, :])


@triton.jit
def _with_spares(factors, spares, out, table, blocks):
    of, k, _ = _program(table, blocks)
    length = tl.load(of + 2)
    begin, t = tl.load(of + 5) + k * length, tl.arange(0, _LINE)
    found = tl.full((_LINE,), 0, tl.int32)
    for at in range(0, length, _LINE):
        found |= (tl.load(factors + begin + at + t, at + t < length, 0.0) != 0).to(tl.int32)
    some = tl.max(found, 0) > 0
    for at in range(0, length, _LINE):
        places, inside = begin + at + t, at + t < length
        row = tl.where(some, tl.load(factors + places, inside, 0.0), tl.load(spares + places, inside, 0.0))
        tl.store(out + places, row, inside)


@triton.jit
def _largest(factors, largest, table, blocks):
    """Find the largest magnitude of each row, as whole numbers that order as magnitudes do, NaN above all."""
    of, k, _ = _program(table, blocks)
    length, t = tl.load(of + 2), tl.arange(0, _LINE)
    begin, most = tl.load(of + 5) + k * length, tl.full((_LINE,), 0, tl.int32)
    for at in range(0, length, _LINE):
        x = tl.load(factors + begin + at + t, at + t < length, 0.0)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(largest + tl.program_id(0), tl.max(most, 0))


@triton.jit
def _unit_rows(factors, spares, largest, units, kept, table, blocks, negligible, RANK: tl.constexpr):
    of, k, _ = _program(table, blocks)
    length, rank = tl.load(of + 2), tl.load(of + 3)
    begin, t, rows = tl.load(of + 5) + k * length, tl.arange(0, _LINE), tl.arange(0, RANK)
    first = largest + tl.program_id(0) - k
    most = tl.max(tl.load(first + rows, rows < rank, 0), 0).to(tl.float32, bitcast=True)
    own = tl.load(first + k).to(tl.float32, bitcast=True)
    dropped = own <= negligible * most
    scale = tl.full((_LINE,), 0.0, tl.float32) + tl.where(dropped, 1.0, own)
    squares = tl.full((_LINE,), 0.0, tl.float32)
    for at in range(0, length, _LINE):
        x = tl.div_rn(tl.load(factors + begin + at + t, at + t < length, 0.0), scale)
        squares += x * x
    norm = scale * 0.0 + tl.sqrt_rn(tl.sum(squares, 0))
    norm = tl.where(dropped, 1.0, norm)
    factor = tl.load(of + 8).to(tl.int32).to(tl.float32, bitcast=True)
    for at in range(0, length, _LINE):
        places, inside = begin + at + t, at + t < length
        x = tl.div_rn(tl.div_rn(tl.load(factors + places, inside, 0.0), scale), norm)
        tl.store(units + places, tl.where(dropped, 0.0, x * factor), inside)
        tl.store(kept + places, tl.where(dropped, tl.load(spares + places, inside, 0.0), x), inside)


@triton.jit
def _outer(given, left, right, out, table, blocks, share, LESS: tl.constexpr):
    of, first, begin = _program(table, blocks)
    m, n, rank = tl.load(of + 1), tl.load(of + 2), tl.load(of + 3)
    i, j = first + tl.arange(0, _ROWS), begin + tl.arange(0, _WIDE)
    p, q = left + tl.load(of + 5), right + tl.load(of + 4)
    total = tl.full((_ROWS, _WIDE), 0.0, tl.float32)
    for k in range(rank):
        total += tl.load(p + k * n + i, i < n, 0.0)[:, None] * tl.load(q + k * m + j, j < m, 0.0)[None, :]
    places, inside = tl.load(of) + i[:, None] * m + j[None, :], (i < n)[:, None] & (j < m)[None, :]
    if LESS:
        total = tl.load(given + places, inside, 0.0) - total * share
    tl.store(out + places, total, inside)
