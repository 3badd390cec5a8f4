"""Codes of a layer's slices under bases, eq. (3), slices of codes, eq. (5), and the ring that sums codes.

Yu, Lin, et al., "GradiVeQ: Vector quantization for bandwidth-efficient gradient aggregation in distributed CNN
training", NeurIPS 2018. Codes of all slices lie one after another, so that a ring's segments can be cut between any two
codes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from gradlab.collectives.ring import segment_bounds
from gradlab.learning.slice_pca import served_rows
from gradlab.workspace import Workspace

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # what SplitMix64 adds to its state for each number


@dataclass(frozen=True)
class SliceCode:
    """A linear code of slices of K elements.

    A slice x is coded as U^T x, followed by the chosen coordinates of its rest, x - U U^T x, if there are any.

    basis: (B, K, d), orthonormal columns.
    reuse: consecutive slices that one basis serves; None: one basis serves all.
    coordinates: int64 (B, R), different ones of each basis; None: none.
    """

    basis: torch.Tensor
    reuse: int | None = None
    coordinates: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Codes of a slice."""
        return self.basis.shape[2] + (0 if self.coordinates is None else self.coordinates.shape[1])

    def encode(self, slices: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Code slices (m, K), the first of which has the index `first` in its layer, eq. (3); returns a vector."""
        if (places := self._drawn_alone(slices, first)) is not None:
            return slices.gather(1, places).view(-1)
        if (shape := self._runs_alike(slices, first)) is not None:
            return self._encode_alike(slices.view(shape))
        parts = [self._encode(rows, b).reshape(-1) for rows, b in served_rows(slices, self.reuse, first)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode(self, codes: torch.Tensor, out: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Write the slices (m, K) that a vector of codes stands for into `out`, eq. (5); `first` as in `encode`."""
        if (places := self._drawn_alone(out, first)) is not None:
            return out.zero_().scatter_(1, places, codes.view(places.shape))
        if (shape := self._runs_alike(out, first)) is not None:
            self._decode_alike(codes.view(*shape[:2], -1), out.view(shape))
            return out
        runs, done = served_rows(out, self.reuse, first), 0
        for rows, b in runs:
            count = len(rows) * self.width
            self._decode(codes[done : done + count].view(len(rows), -1), b, rows)
            done += count
        return out

    def _drawn_alone(self, slices: torch.Tensor, first: int) -> torch.Tensor | None:
        """Return the coordinates of each slice, (m, R), if they are all that is sent and every basis serves as many."""
        if self.coordinates is None or self.basis.shape[2] or first:
            return None
        (bases, count), rows = self.coordinates.shape, slices.shape[0]  # len() of a tensor takes microseconds
        served = rows // bases
        if rows % bases or served != (self.reuse or served):
            return None
        return self.coordinates[:, None].expand(bases, served, count).reshape(rows, count)

    def _runs_alike(self, slices: torch.Tensor, first: int) -> tuple[int, int, int] | None:
        """Return the shape (B, m, K) of slices of which several bases serve m each."""
        bases, served = len(self.basis), len(slices) // len(self.basis)
        if bases == 1 or not served or first or len(slices) % bases or served != (self.reuse or served):
            return None
        return bases, served, slices.shape[1]

    def _encode_alike(self, runs: torch.Tensor) -> torch.Tensor:
        """Code runs of slices (B, m, K), each with its basis, by one product; returns a vector."""
        axes = self.basis
        if self.coordinates is None:
            return torch.bmm(runs, axes).view(-1)
        chosen, codes = self.coordinates[:, None], runs.new_empty(*runs.shape[:2], self.width)
        fitted, left = codes.split([axes.shape[2], chosen.shape[2]], dim=2)
        fitted.copy_(torch.bmm(runs, axes))
        chosen_axes = axes.gather(1, chosen.mT.expand(-1, -1, axes.shape[2]))
        chosen_values = runs.gather(2, chosen.expand(-1, runs.shape[1], -1))
        left.copy_(torch.baddbmm(chosen_values, fitted, chosen_axes.mT, alpha=-1))
        return codes.view(-1)

    def _decode_alike(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        axes = self.basis
        torch.bmm(codes[:, :, : axes.shape[2]], axes.mT, out=out)
        if self.coordinates is not None:
            chosen = self.coordinates[:, None].expand(-1, out.shape[1], -1)
            out.scatter_add_(2, chosen, codes[:, :, axes.shape[2] :])

    def _encode(self, rows: torch.Tensor, b: int) -> torch.Tensor:
        axes = self.basis[b]
        if self.coordinates is None:
            return rows @ axes
        chosen, codes = self.coordinates[b], rows.new_empty(len(rows), self.width)
        fitted, left = codes.split([axes.shape[1], len(chosen)], dim=1)
        fitted.copy_(rows @ axes)
        left.copy_(torch.addmm(rows.index_select(1, chosen), fitted, axes[chosen].T, alpha=-1))
        return codes

    def _decode(self, codes: torch.Tensor, b: int, out: torch.Tensor) -> None:
        axes = self.basis[b]
        torch.mm(codes[:, : axes.shape[1]], axes.T, out=out)
        if self.coordinates is not None:
            out.index_add_(1, self.coordinates[b], codes[:, axes.shape[1] :])


@dataclass(frozen=True)
class CodedSlices:
    """One rank's slices (M, K) under a code, less a mean (M, K) if there is one: eqs. (3) and (5)."""

    slices: torch.Tensor
    code: SliceCode
    mean: torch.Tensor | None
    workspace: Workspace

    def encode(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Return the codes of slices `first` to `last`, or of all, a vector."""
        centred = self.slices[first:last]
        if self.mean is not None:
            centred = torch.sub(centred, self.mean[first:last], out=self.workspace.empty_like(centred))
        return self.code.encode(centred, first)

    def decode(self, codes: torch.Tensor, out: torch.Tensor | None = None, first: int = 0) -> torch.Tensor:
        """Return the slices (m, K) that codes stand for: all of them, or those from `first` on, in `out`."""
        out = self.workspace.empty_like(self.slices) if out is None else out
        self.code.decode(codes, out, first)
        return out if self.mean is None else out.add_(self.mean[first : first + out.shape[0]])


class SliceCoder:
    """Codes and decodes one rank's slices run by run; the order in which segments come does not change the bits. The
    codes of all slices are cut into segments of equal length, so that a ring's segments are equal.

    turn: see `segment_bounds`.
    """

    def __init__(self, coded: CodedSlices, segments: int, turn: int) -> None:
        self._of, self._width = coded, coded.code.width
        self._count = self._width * len(coded.slices)
        self.bounds = segment_bounds(self._count, segments, turn)
        self._runs = self._slice_runs()
        self._codes, self._means = coded.slices.new_empty(2, self._count)
        self._coded = [False] * len(self._runs)
        self._missing = [self._width * (last - first) for first, last in self._runs]
        self._decoded: torch.Tensor | None = None

    def _slice_runs(self) -> list[tuple[int, int]]:
        """List for each segment the slices [first, last) whose first code lies in it."""
        starts = [-(-first // self._width) for first, _ in self.bounds]
        return list(pairwise([*starts, len(self._of.slices)]))

    def _runs_of(self, first: int, last: int) -> range:
        """List the runs that codes first to last belong to."""
        if first == last:
            return range(0)
        of_slice = [code // self._width for code in (first, last - 1)]
        lasts = [run[1] for run in self._runs]
        return range(bisect_right(lasts, of_slice[0]), bisect_right(lasts, of_slice[1]) + 1)

    def encode(self, first: int, last: int) -> torch.Tensor:
        """Return codes `first` to `last` of this rank's slices, a vector."""
        for run in self._runs_of(first, last):
            if not self._coded[run]:
                self._encode(*self._runs[run])
                self._coded[run] = True
        return self._codes[first:last]

    def _encode(self, first: int, last: int) -> None:
        if first < last:
            self._codes[self._width * first : self._width * last].copy_(self._of.encode(first, last))

    def receive(self, first: int, last: int, codes: torch.Tensor) -> torch.Tensor:
        """Take in the mean codes `first` to `last`, decode slices whose codes are complete now; return the codes."""
        self._means[first:last].copy_(codes)
        for run in self._runs_of(first, last):
            begin, end = (self._width * m for m in self._runs[run])
            self._missing[run] -= min(last, end) - max(first, begin)
            if self._missing[run] == 0:
                self._decode(self._means, *self._runs[run], self._whole())
        return codes

    def _whole(self) -> torch.Tensor:
        if self._decoded is None:
            self._decoded = self._of.workspace.empty_like(self._of.slices)
        return self._decoded

    def _decode(self, codes: torch.Tensor, first: int, last: int, out: torch.Tensor) -> None:
        if first < last:
            self._of.decode(codes[self._width * first : self._width * last], out[first:last], first)

    def decoded(self) -> torch.Tensor:
        """Return the slices (M, K) that all mean codes stand for, once they are received."""
        if any(self._missing):
            raise RuntimeError(f"{sum(self._missing)} of {self._count} codes have not been received")
        return self._whole()

    def own(self) -> torch.Tensor:
        """Decode this rank's own codes: (M, K)."""
        out, codes = self._of.workspace.empty_like(self._of.slices), self.encode(0, self._count)
        for run in self._runs:
            self._decode(codes, *run, out)
        return out


def random_coordinates(seeds: np.ndarray, bases: int, size: int, count: int) -> torch.Tensor:
    """Draw `count` different ones of `size` coordinates for each of B bases of L layers, int64 (L B, count), ascending.

    Those with the smallest of random numbers of 64 bits are drawn, which follow from a layer's seed and their place
    alone (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: SplitMix64).

    seeds: seed of each layer's stream, uint64 (L,), the same on every rank.
    """
    places = np.arange(1, bases * size + 1, dtype=np.uint64) * _GOLDEN
    numbers = _mixed(np.add.outer(_mixed(seeds.copy()), places)).reshape(len(seeds) * bases, size)
    found = numbers.argpartition(count - 1, axis=1)[:, :count]
    return torch.from_numpy(np.sort(found, axis=1))


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers, in place: SplitMix64's function of its state."""
    shifted = numbers >> np.uint64(30)
    numbers ^= shifted
    numbers *= np.uint64(0xBF58476D1CE4E5B9)
    numbers ^= np.right_shift(numbers, np.uint64(27), out=shifted)
    numbers *= np.uint64(0x94D049BB133111EB)
    numbers ^= np.right_shift(numbers, np.uint64(31), out=shifted)
    return numbers
