"""Compare what a plan applies with the true means: in one step, and summed over windows of successive steps.

Training follows the sum of updates. Error feedback applies in later steps what it did not send at once, and momentum
spreads a gradient over many steps: in each step both look wrong, and their sums are right. A part that a code never
sends is missing from the sum too, and the noise of an unbiased code averages out in it.

With A_t the applied and G_t the true mean of step t, a window of W steps has the error ||sum A - sum G|| / ||sum G||
and the cosine <sum A, sum G> / (||sum A|| ||sum G||). W = 1 is one step. Two running sums are held for each length, so
that memory does not grow with the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from gradlab.codec import Tensors
from gradlab.codec.measures import relative, squared_norm
from gradlab.jsonable import Jsonable

# Lengths of the windows that a replay sums over, beside its single steps.
LENGTHS = (4, 16, 64)


class Overlap(NamedTuple):
    """How two vectors agree: ||A - G||^2, ||G||^2, ||A||^2 and <A, G>. Overlaps of parts of the vectors add up."""

    error: float = 0.0
    true: float = 0.0
    applied: float = 0.0
    inner: float = 0.0

    @property
    def relative_error(self) -> float:
        """||A - G|| / ||G||; 0 if both are 0, infinite if only G is."""
        return relative(self.error, self.true)

    @property
    def cosine(self) -> float:
        """The cosine of the angle between A and G. Two vectors that are zero agree perfectly."""
        product = (self.true * self.applied) ** 0.5
        return min(1.0, max(-1.0, self.inner / product)) if product > 0 else float(self.true == self.applied)


def added(overlaps: Sequence[Overlap]) -> Overlap:
    """Add the overlaps of parts of two vectors."""
    return Overlap(*(sum(values) for values in zip(*overlaps, strict=True))) if overlaps else Overlap()


def overlap(applied: Tensors, true: Tensors, weights: Mapping[str, float]) -> Overlap:
    """Compute the overlap of applied A and true G by layer name; weights: factors on a layer's squares, default 1."""
    parts = []
    for name, mean in applied.items():
        other, weight = true[name], weights.get(name, 1.0)
        inner = float((mean.double() * other.double()).sum())
        squares = (squared_norm(mean - other), squared_norm(other), squared_norm(mean), inner)
        parts.append(Overlap(*(weight * value for value in squares)))
    return added(parts)


@dataclass(frozen=True)
class WindowSums:
    """One window of one part of a plan: its length, its first and last iteration, whether all its steps were finite."""

    length: int
    first: int
    last: int
    finite: bool
    overlap: Overlap


class RunningSums:
    """Sums of applied and true means over consecutive windows, for several lengths at once.
    A window counts compressed steps, finite or not, so that windows of all parts of a plan are the same.
    """

    def __init__(self, weights: Mapping[str, float], lengths: Sequence[int] = LENGTHS) -> None:
        self.windows: list[WindowSums] = []
        self._weights = weights
        self._open = {length: _Open() for length in lengths}

    def add(self, iteration: int, applied: Tensors | None, true: Tensors | None) -> None:
        """Add a compressed step: applied and true means by layer name; None and None if the step was not finite."""
        for length, window in self._open.items():
            window.first = iteration if window.steps == 0 else window.first
            window.steps += 1
            if applied is None or true is None:
                window.finite = False
            elif window.finite:
                accumulate(window.applied, applied)
                accumulate(window.true, true)
            if window.steps == length:
                self.windows.append(self._closed(length, window, iteration))
                self._open[length] = _Open()

    def _closed(self, length: int, window: _Open, last: int) -> WindowSums:
        agreed = overlap(window.applied, window.true, self._weights) if window.finite else Overlap()
        return WindowSums(length, window.first, last, window.finite, agreed)


@dataclass
class _Open:
    """A window that is not complete."""

    steps: int = 0
    first: int = 0
    finite: bool = True
    applied: dict[str, torch.Tensor] = field(default_factory=dict)
    true: dict[str, torch.Tensor] = field(default_factory=dict)


def accumulate(total: dict[str, torch.Tensor], more: Tensors) -> None:
    """Add to sums of at least float32, in place."""
    for name, value in more.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value.to(torch.promote_types(value.dtype, torch.float32), copy=True)


@dataclass(frozen=True)
class Window(Jsonable):
    """A window of a replay: number of steps, first and last iteration, error and cosine of the sums (None: a step was
    not finite)."""

    length: int
    first: int
    last: int
    error: float | None
    cosine: float | None


def joined(parts: Sequence[Sequence[WindowSums]]) -> tuple[Window, ...]:
    """Join the windows of a plan's parts, the shortest first."""
    windows = []
    for same in zip(*parts, strict=True):
        first, total = same[0], added([part.overlap for part in same])
        known = all(part.finite for part in same)
        error, cosine = (total.relative_error, total.cosine) if known else (None, None)
        windows.append(Window(first.length, first.first, first.last, error, cosine))
    return tuple(sorted(windows, key=lambda window: (window.length, window.first)))
