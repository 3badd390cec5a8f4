"""Codes of symbols of levels that everybody knows, so that no table travels and none is learned.

A part of a layer names the one of its kind's codes that its symbols take the fewest bits under. The codes are those of
a family of distributions: levels of Laplacian values whose scales differ from place to place by a few fixed ratios.
Their numbers are computed by sums, products and quotients alone, so that every processor has the same codes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from gradlab.coding.huffman import SYMBOLS, Code, code_of

INDEX = 7  # bits of a code's number
# Shares of places, and the scales of values there, over the mean.
_ALIKE = ((1.0, 1.0),)
_APART = ((0.35, 0.2), (0.35, 1.0), (0.3, 4.0))
_FAR_APART = ((0.3, 0.06), (0.3, 0.5), (0.2, 2.0), (0.2, 8.0))
_SPREADS = (_ALIKE, _APART, _FAR_APART)
_GAPS = (0.4, 0.8, 1.5, 2.8, 4.5, 6.5)  # means of the high parts of gaps
_MORE = (0.02, 0.06, 0.14, 0.3, 0.6, 1.5, 5.0)  # of magnitudes above 1
_OF_PAIRS = (0.3, 0.45, 0.65, 0.9, 1.3, 1.9, 2.7, 4.0)  # of magnitudes
_OF_NUMBERS = (0.6, 0.9, 1.3, 1.9, 2.7, 4.0, 6.0, 9.0, 14.0, 21.0, 32.0, 48.0, 72.0, 110.0)
_NEIGHBOURS = (1.0, 0.6)  # how much rarer each step is by which two numbers in a row differ
_ZEROS = (0.0, 0.5)  # share of places where nearly all numbers are zero, and their mean magnitude there
_NEAR_ZERO = 0.5
_RAREST, _WEIGHTS = 1e-9, 2**22


@dataclass(frozen=True)
class Book:
    """The codes of symbols of one kind.

    codes: K of them.
    widths: widths of their codes in bits, (K, 256), int64.
    """

    codes: tuple[Code, ...]
    widths: np.ndarray

    def shortest(self, counts: np.ndarray) -> np.ndarray:
        """Return which code takes the fewest bits for symbols of these frequencies, (P, 256): (P,)."""
        return (counts @ self.widths.T).argmin(1)


@functools.cache
def books(least: tuple[int, ...], paired: int, middle: int) -> tuple[Book, Book, Book]:
    """Make the codes of gaps with magnitudes, of pairs of numbers, and of numbers.

    least: least number of each of sixteen classes of gaps and magnitudes.
    paired, middle: largest magnitude of a number that shares its symbol, and of one that does not.
    """
    gaps = [_gaps(gap, more, spread, least) for gap, more, spread in product(_GAPS, _MORE, _SPREADS)]
    pairs = [_pairs(mean, spread, rarer, paired) for mean, spread, rarer in product(_OF_PAIRS, _SPREADS, _NEIGHBOURS)]
    pairs += [np.outer(one, one) for one in (_normal_numbers(deviation, paired) for deviation in _OF_PAIRS)]
    numbers = [_numbers(mean, spread, zeros, middle) for mean, spread, zeros in product(_OF_NUMBERS, _SPREADS, _ZEROS)]
    numbers += [_normal_numbers(deviation, middle) for deviation in _OF_NUMBERS]
    return _book(gaps), _book(pairs), _book(numbers)


def _book(shares: Sequence[np.ndarray]) -> Book:
    codes = tuple(code_of(np.rint(_WEIGHTS * _normal(one.reshape(-1))).astype(np.int64)) for one in shares)
    assert len(codes) <= 2**INDEX
    assert all(one.size == SYMBOLS for one in shares)
    return Book(codes, np.stack([code.widths for code in codes]).astype(np.int64))


def _normal(shares: np.ndarray) -> np.ndarray:
    return shares / math.fsum(shares.reshape(-1).tolist())


def _scaled(spread: Sequence[tuple[float, float]], rising: bool = True) -> list[tuple[float, float]]:
    """Return shares, and factors whose mean is 1, that rise with the scale of values or fall."""
    factors = [scale if rising else 1.0 / scale for _, scale in spread]
    mean = math.fsum(share * factor for (share, _), factor in zip(spread, factors, strict=True))
    return [(share, factor / mean) for (share, _), factor in zip(spread, factors, strict=True)]


def _tails(mean: float, count: int) -> list[float]:
    """Return the shares of geometrically distributed numbers of this mean that are 0, 1, ..., `count` or more."""
    ratio, tails = mean / (1.0 + mean), [1.0]
    for _ in range(count):
        tails.append(tails[-1] * ratio)
    return tails


def _classes(mean: float, least: tuple[int, ...]) -> np.ndarray:
    tails = _tails(mean, least[-1])
    return np.array([tails[a] - tails[b] for a, b in pairwise(least)] + [tails[least[-1]]])


def _gaps(gap: float, more: float, spread: Sequence[tuple[float, float]], least: tuple[int, ...]) -> np.ndarray:
    """Return shares of classes of gaps and of magnitudes: where values are large, gaps are short."""
    total = np.zeros((len(least), len(least)))
    for (share, longer), (_, larger) in zip(_scaled(spread, rising=False), _scaled(spread), strict=True):
        total += share * np.outer(_classes(gap * longer, least), _classes(more * larger, least))
    return total


def _signed(mean: float, most: int) -> np.ndarray:
    """Return shares of numbers from -most to most, and of all that are larger."""
    tails = _tails(mean, most + 1)
    above = [(tails[k] - tails[k + 1]) / 2.0 for k in range(1, most + 1)]
    return np.array([*reversed(above), 1.0 - tails[1], *above, max(_RAREST, tails[-1])])


def _normal_numbers(deviation: float, most: int) -> np.ndarray:
    """Return shares of normally distributed numbers as `_signed` does. It need not be near the normal ones."""
    squared = 1.0 - 1.0 / (2048.0 * deviation * deviation)
    for _ in range(10):  # to the power of 1,024: exp(-1 / (2 deviation^2)), about
        squared *= squared
    above, ratio = [1.0], squared
    for _ in range(most):
        above.append(above[-1] * ratio)
        ratio *= squared * squared
    return np.array([*reversed(above[1:]), *above, max(_RAREST, above[-1])])


def _pairs(mean: float, spread: Sequence[tuple[float, float]], rarer: float, most: int) -> np.ndarray:
    number = np.arange(2 * most + 2)
    apart = np.abs(number[:, None] - number)
    apart[-1], apart[:, -1], apart[-1, -1] = most + 1, most + 1, 0
    falling = [1.0]
    for _ in range(2 * most):
        falling.append(falling[-1] * rarer)
    total = np.zeros(apart.shape)
    for share, larger in _scaled(spread):
        one = _signed(mean * larger, most)
        total += share * _normal(np.outer(one, one) * np.array(falling)[apart])
    return np.maximum(total, _RAREST)


def _numbers(mean: float, spread: Sequence[tuple[float, float]], zeros: float, most: int) -> np.ndarray:
    total = zeros * _signed(_NEAR_ZERO, most)
    for share, larger in _scaled(spread):
        total += (1.0 - zeros) * share * _signed(mean * larger, most)
    return total
