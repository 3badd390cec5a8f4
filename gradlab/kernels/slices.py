"""Codes of the slices of many layers, and slices of codes, each by one launch for all layers of a group.

They are `gradlab.learning.slice_code.SliceCode`'s where one basis serves a layer. Slices are read and written where
they lie in the gradients. Sums run in another order than a BLAS's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from gradlab.kernels import launch

_FIELDS = tl.constexpr(15)  # of a row in `SliceCodes`
_M, _N, _K = tl.constexpr(32), tl.constexpr(64), tl.constexpr(32)  # slices, results and summands at once


class Slices(NamedTuple):
    """The slices of a layer (M, K), or what is sent as it is.

    offset: place of the layer in the vector.
    begin: place of the first slice's first element, in the order that slices are cut from.
    slices, size: M and K.
    axes: number of axes in the layer's basis, d.
    drawn: coordinates that are drawn, R; None: all K of them are sent.
    order: F, D and distances in memory of filters, depth and places, by which the order is known.
    whitened: whether a mean is subtracted.
    """

    offset: int
    begin: int
    slices: int
    size: int
    axes: int
    drawn: int | None
    order: tuple[int, ...]
    whitened: bool = False

    @property
    def others(self) -> int:
        """Codes of a slice that are no products with axes."""
        return self.size if self.drawn is None else self.drawn


class SliceCodes:
    """The codes of slices that lie in one vector, under bases (K, d), means (M, K) and coordinates (R,) of all layers,
    one after another. Without any axes and means those are not read."""

    def __init__(self, rows: Sequence[Slices], device: torch.device) -> None:
        def firsts(size: Callable[[Slices], int]) -> np.ndarray:
            return np.cumsum([0, *map(size, rows)])

        codes = firsts(lambda row: row.slices * (row.axes + row.others))
        bases, drawn = firsts(lambda row: row.size * row.axes), firsts(lambda row: row.drawn or 0)
        means = firsts(lambda row: row.slices * row.size * row.whitened)
        table = [
            (*row[:5], row.others, codes[at], *row.order, bases[at], -1 if row.drawn is None else drawn[at],
             means[at] if row.whitened else -1)
            for at, row in enumerate(rows)
        ]  # fmt: skip
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._codes, self._fitted = int(codes[-1]), any(row.axes or row.whitened for row in rows)
        self._products, self._others, self._wholes = (
            _tiles([(row.slices, getattr(row, what)) for row in rows]).to(device) for what in ("axes", "others", "size")
        )

    def encode(
        self, vector: torch.Tensor, bases: torch.Tensor, means: torch.Tensor, drawn: torch.Tensor
    ) -> torch.Tensor:
        """Return all codes, a vector."""
        codes = vector.new_empty(self._codes)
        launch(_multiply, len(self._products), vector, bases, means, codes, self._table, self._products)
        given = (vector, bases, means, drawn, codes, self._table, self._others)
        launch(_take, len(self._others), *given, FITTED=self._fitted)
        return codes

    def decode(
        self,
        codes: torch.Tensor,
        bases: torch.Tensor,
        means: torch.Tensor,
        drawn: torch.Tensor,
        out: torch.Tensor,
        less_from: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write what codes stand for to a vector, or `less_from` less that."""
        given, less = out if less_from is None else less_from, less_from is not None
        if self._fitted:
            launch(_spread, len(self._wholes), codes, bases, means, given, out, self._table, self._wholes, LESS=less)
        elif less:
            out.copy_(given)
        else:
            out.zero_()
        launch(_put, len(self._others), codes, drawn, out, self._table, self._others, LESS=less)
        return out


def _tiles(sizes: Sequence[tuple[int, int]]) -> torch.Tensor:
    """List the programs for results of these sizes: layer, first row, first column."""
    return torch.tensor(
        [
            (at, row, column)
            for at, (rows, columns) in enumerate(sizes)
            for row in range(0, rows, _M.value)
            for column in range(0, columns, _N.value)
        ],
        dtype=torch.int64,
    ).view(-1, 3)


@triton.jit
def _program(table, tiles):
    """Return a program's layer, its slices, its columns, and the layer's M, K, d and number of other codes."""
    at = tiles + 3 * tl.program_id(0)
    of = table + _FIELDS * tl.load(at)
    m, n = tl.load(at + 1).to(tl.int32) + tl.arange(0, _M), tl.load(at + 2).to(tl.int32) + tl.arange(0, _N)
    count, size = tl.load(of + 2).to(tl.int32), tl.load(of + 3).to(tl.int32)
    return of, m, n, count, size, tl.load(of + 4).to(tl.int32), tl.load(of + 5).to(tl.int32)


@triton.jit
def _places(of, m, k):
    """Return where elements k of slices m lie in the vector."""
    j = tl.load(of + 1).to(tl.int32) + m[:, None] * tl.load(of + 3).to(tl.int32) + k[None, :]
    filters, depth = tl.load(of + 7).to(tl.int32), tl.load(of + 8).to(tl.int32)
    other = j // filters
    return (
        tl.load(of)
        + j % filters * tl.load(of + 9)
        + other % depth * tl.load(of + 10)
        + other // depth * tl.load(of + 11)
    )


@triton.jit
def _mean(means, of, m, k, size, inside):
    first = tl.load(of + 14)
    some = inside & (k < tl.where(first < 0, 0, size))[None, :]
    return tl.load(means + first + m[:, None] * size + k[None, :], some, 0.0)


@triton.jit
def _axes(bases, of, k, j, size, axes):
    """Load axes j, elements k of them, (elements, axes); zero beyond."""
    at = bases + tl.load(of + 12) + k * axes + j
    return tl.load(at, (k < size) & (j < axes), 0.0)


@triton.jit
def _multiply(vector, bases, means, codes, table, tiles):
    of, m, n, count, size, axes, others = _program(table, tiles)
    total = tl.zeros((_M, _N), tl.float32)
    for begin in range(0, size, _K):
        k = begin + tl.arange(0, _K)
        inside = (m < count)[:, None] & (k < size)[None, :]
        x = tl.load(vector + _places(of, m, k), inside, 0.0) - _mean(means, of, m, k, size, inside)
        total += tl.dot(x, _axes(bases, of, k[:, None], n[None, :], size, axes), input_precision="ieee")
    at = codes + tl.load(of + 6) + m[:, None] * (axes + others) + n[None, :]
    tl.store(at, total, (m < count)[:, None] & (n < axes)[None, :])


@triton.jit
def _coordinates(drawn, of, n, others):
    first = tl.load(of + 13)
    return tl.where(first < 0, n, tl.load(drawn + first + n, n < tl.where(first < 0, 0, others), 0))


@triton.jit
def _product(codes, bases, of, m, k, count, size, axes, others):
    """Multiply fitted codes of slices m with the axes, for elements k: (slices, elements)."""
    total = tl.zeros((_M, _N), tl.float32)
    for begin in range(0, axes, _K):
        j = begin + tl.arange(0, _K)
        at = codes + tl.load(of + 6) + m[:, None] * (axes + others) + j[None, :]
        code = tl.load(at, (m < count)[:, None] & (j < axes)[None, :], 0.0)
        total += tl.dot(code, _axes(bases, of, k[None, :], j[:, None], size, axes), input_precision="ieee")
    return total


@triton.jit
def _take(vector, bases, means, drawn, codes, table, tiles, FITTED: tl.constexpr):
    of, m, n, count, size, axes, others = _program(table, tiles)
    k, inside = _coordinates(drawn, of, n, others), (m < count)[:, None] & (n < others)[None, :]
    x = tl.load(vector + _places(of, m, k), inside, 0.0)
    if FITTED:
        x -= _mean(means, of, m, k, size, inside)
        x -= _product(codes, bases, of, m, k, count, size, axes, others)
    tl.store(codes + tl.load(of + 6) + m[:, None] * (axes + others) + axes + n[None, :], x, inside)


@triton.jit
def _spread(codes, bases, means, given, out, table, tiles, LESS: tl.constexpr):
    of, m, n, count, size, axes, others = _program(table, tiles)
    places, inside = _places(of, m, n), (m < count)[:, None] & (n < size)[None, :]
    total = _product(codes, bases, of, m, n, count, size, axes, others) + _mean(means, of, m, n, size, inside)
    if LESS:
        total = tl.load(given + places, inside, 0.0) - total
    tl.store(out + places, total, inside)


@triton.jit
def _put(codes, drawn, out, table, tiles, LESS: tl.constexpr):
    of, m, n, count, _, axes, others = _program(table, tiles)
    places, inside = _places(of, m, _coordinates(drawn, of, n, others)), (m < count)[:, None] & (n < others)[None, :]
    code = tl.load(codes + tl.load(of + 6) + m[:, None] * (axes + others) + axes + n[None, :], inside, 0.0)
    total = tl.load(out + places, inside, 0.0)
    tl.store(out + places, total - code if LESS else total + code, inside)
