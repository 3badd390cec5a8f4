"""Encode whole numbers that are mostly zero as bytes, near their entropy.

A layer in which at most half of the numbers are other than zero is sent as gaps: how many zeros stand before each other
number. The class of a gap's high part and the class of a magnitude are a byte that gets a Huffman code. Where they lie
in their classes, a gap's low bits, and signs are next to uniform and are sent as they are. How many bits are low
follows from the layer's share of zeros, so that gaps of layers whose shares differ share one table. A denser layer is
sent number by number, each a byte that gets a Huffman code. What is too large for a class or a byte takes four bytes.

Tables come with the bytes, as DEFLATE writes them anew for every 32 thousand codes or so. Nothing has to be known
but the layers' sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gradlab.coding.deflate import CODES_ALONE, MATCHES, deflated, inflated
from gradlab.errors import GradlabError

LARGEST = 2**30  # magnitude
_KEPT = 2  # binary digits of the mean gap that its high part has
# The least number of each class, and how many bits say where in its class a number is; the last class has no end.
_LEAST = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256], np.int32)
_INSIDE = np.array([0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 3, 3, 5, 6, 7, 0], np.uint8)
_ENDLESS = len(_LEAST) - 1
_CLASS = (np.searchsorted(_LEAST, np.arange(_LEAST[-1] + 1), "right") - 1).astype(np.uint8)  # of 0 to 256
_MIDDLE = 127  # byte of a zero in a dense layer; 255 stands for a number in four bytes
_COUNT = struct.Struct("<I")


@dataclass(frozen=True)
class _Layers:
    """How the numbers of several layers are sent.

    edges: where layers begin in the vector, and its end: (L + 1,).
    counts: numbers other than zero of each layer, (L,).
    dense: whether a layer is sent number by number, (L,).
    low_bits: of the gaps of each layer, (L,).
    """

    edges: np.ndarray
    counts: np.ndarray
    dense: np.ndarray
    low_bits: np.ndarray

    @property
    def in_dense(self) -> np.ndarray:
        """Whether each number other than zero lies in a dense layer."""
        return np.repeat(self.dense, self.counts)


def _layers(sizes: Sequence[int], counts: np.ndarray) -> _Layers:
    numels = np.array(sizes, np.int64)
    if len(numels) and numels.max() >= 2**31:
        raise GradlabError(f"levels: a layer of {numels.max()} elements, expected fewer than 2^31")
    mean_gap = np.maximum(1, numels // np.maximum(1, counts))
    low_bits = np.maximum(0, np.frexp(mean_gap.astype(np.float64))[1] - 1 - _KEPT).astype(np.uint8)
    return _Layers(np.concatenate([[0], np.cumsum(numels)]), counts, 2 * counts > numels, low_bits)


def encode_levels(positions: np.ndarray, levels: np.ndarray, sizes: Sequence[int]) -> bytes:
    """Encode numbers other than zero and where they are.

    Args:
        positions: ascending, (count,), int64.
        levels: there, (count,), int32, not 0, of magnitudes up to `LARGEST`.
        sizes: of the layers that positions count through, in elements.

    Returns:
        The bytes.
    """
    edges = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    layers = _layers(sizes, np.diff(np.searchsorted(positions, edges)))
    counts = deflated(np.ascontiguousarray(layers.counts.astype("<u4").view(np.uint8).reshape(-1, 4).T), MATCHES)
    in_dense = layers.in_dense
    if not in_dense.any():
        return b"".join([counts, *_gaps(positions, levels, layers)])
    sparse = ~in_dense
    return b"".join(
        [
            counts,
            *_gaps(positions[sparse], levels[sparse], layers),
            *_numbers(positions[in_dense], levels[in_dense], layers),
        ]
    )


def decode_levels(data: bytes, sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Decode what `encode_levels` returned.

    Args:
        data: the bytes.
        sizes: of the layers, in elements.

    Returns:
        Positions (count,), int64, ascending, and levels (count,), int32.

    Raises:
        GradlabError: for bytes that do not stand for such numbers of such layers.
    """
    planes, rest = inflated(data, 4 * len(sizes), "levels: counts")
    counts = np.frombuffer(planes, np.uint8).reshape(4, -1).T.copy().view("<u4").reshape(-1).astype(np.int64)
    if len(counts) and (counts > np.array(sizes, np.int64)).any():
        worst = int(np.argmax(counts - np.array(sizes, np.int64)))
        raise GradlabError(f"levels: {counts[worst]} numbers in layer {worst}, expected at most {sizes[worst]}")
    layers = _layers(sizes, counts)
    positions, levels, rest = _from_gaps(rest, layers)
    if layers.dense.any():
        of_dense, levels_there, rest = _from_numbers(rest, layers)
        positions, levels = np.concatenate([positions, of_dense]), np.concatenate([levels, levels_there])
        order = np.argsort(positions, kind="stable")  # two runs, each in order: a merge
        positions, levels = positions[order], levels[order]
    if rest:
        raise GradlabError(f"levels: {len(rest)} bytes more than there should be")
    return positions, levels


# --- layers that are mostly zero -----------------------------------------------------------------------------------


def _gaps(positions: np.ndarray, levels: np.ndarray, layers: _Layers) -> list[bytes]:
    gaps, shifts = _gaps_before(positions, layers), _low_bits(layers)
    more = np.abs(levels) - 1
    of_gaps, of_more = _classes(gaps >> shifts), _classes(more)  # numbers and shifts of 32 and 8 bits: half the time
    return [
        deflated(of_gaps * np.uint8(16) + of_more, CODES_ALONE),
        np.packbits(levels < 0).tobytes(),
        *_in_classes(gaps, of_gaps, shifts),
        *_in_classes(more, of_more, np.zeros_like(shifts)),
    ]


def _from_gaps(data: bytes, layers: _Layers) -> tuple[np.ndarray, np.ndarray, bytes]:
    shifts = _low_bits(layers)
    found, rest = inflated(data, len(shifts), "levels: codes")
    joined = np.frombuffer(found, np.uint8)
    negative, rest = _bits(rest, len(shifts))
    gaps, rest = _of_classes(rest, joined >> 4, shifts)
    more, rest = _of_classes(rest, joined & 15, np.zeros_like(shifts))
    if len(more) and (more.min() < 0 or more.max() >= LARGEST):
        raise GradlabError(f"levels: a magnitude beyond {LARGEST}")
    magnitudes = (more + 1).astype(np.int32)
    return _positions(gaps, layers), np.where(negative, -magnitudes, magnitudes), rest


def _classes(numbers: np.ndarray) -> np.ndarray:
    """Return the class of each number, uint8."""
    return _CLASS.take(numbers, mode="clip")


def _in_classes(numbers: np.ndarray, classes: np.ndarray, shifts: np.ndarray) -> list[bytes]:
    """Write where numbers are in the classes of their high parts, and those of the class without an end."""
    endless, widths = _widths(classes, shifts)
    return [*_planes(numbers - (_LEAST.take(classes) << shifts), widths), *_escaped(numbers[endless])]


def _of_classes(data: bytes, classes: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Invert `_in_classes`, and return what follows."""
    endless, widths = _widths(classes, shifts)
    numbers = _LEAST.take(classes) << shifts
    places = None  # of the numbers that have so many bits; None: all
    for bit in range(int(widths.max(initial=0))):
        has = widths > bit
        if not has.all():
            places = np.flatnonzero(has) if places is None else places[has]
            widths = widths[has]
        there, data = _bits(data, len(widths))
        if places is None:
            numbers |= there.astype(np.int32) << bit
        else:
            numbers[places] += there.astype(np.int32) << bit
    return _unescaped(data, numbers, endless)


def _widths(classes: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether numbers are of the class without an end, and how many bits the others have, uint8."""
    endless, widths = classes == _ENDLESS, _INSIDE.take(classes) + shifts
    widths[endless] = 0
    return endless, widths


def _of_gaps(layers: _Layers) -> np.ndarray:
    """Count the numbers that are sent as gaps, by layer."""
    return np.where(layers.dense, 0, layers.counts)


def _low_bits(layers: _Layers) -> np.ndarray:
    """List how many low bits each gap has."""
    return np.repeat(layers.low_bits, _of_gaps(layers))


def _gaps_before(positions: np.ndarray, layers: _Layers) -> np.ndarray:
    """Count the zeros before each number, from the last one or the beginning of its layer."""
    gaps = (np.diff(positions, prepend=-1) - 1).astype(np.int32)
    counts = _of_gaps(layers)
    firsts = np.concatenate([[0], np.cumsum(counts)])[:-1][counts > 0]
    gaps[firsts] = positions[firsts] - layers.edges[:-1][counts > 0]
    return gaps


def _positions(gaps: np.ndarray, layers: _Layers) -> np.ndarray:
    """Invert `_gaps_before`, and refuse gaps that lead out of their layer."""
    counts = _of_gaps(layers)
    passed = np.cumsum(gaps, dtype=np.int64) + np.arange(1, len(gaps) + 1)
    lasts = np.cumsum(counts)
    before = np.where(lasts - counts > 0, passed[np.maximum(0, lasts - counts) - 1] if len(passed) else 0, 0)
    positions = passed - 1 + np.repeat(layers.edges[:-1] - before, counts)
    ends = positions[lasts[counts > 0] - 1]
    if (ends >= layers.edges[1:][counts > 0]).any() or (gaps < 0).any():
        raise GradlabError("levels: a position beyond the end of its layer")
    return positions


def _planes(numbers: np.ndarray, widths: np.ndarray) -> list[bytes]:
    """Write numbers below 2^width, bits of the same weight together."""
    written = []
    for bit in range(int(widths.max(initial=0))):
        has = widths > bit
        if not has.all():
            numbers, widths = numbers[has], widths[has]
        written.append(np.packbits((numbers >> bit & 1).astype(np.uint8)).tobytes())
    return written


def _bits(data: bytes, count: int) -> tuple[np.ndarray, bytes]:
    """Read so many bits, bool, and return what follows."""
    nbytes = -(-count // 8)
    if len(data) < nbytes:
        raise GradlabError(f"levels: {len(data)} bytes left, expected {nbytes} of bits")
    return np.unpackbits(np.frombuffer(data, np.uint8, nbytes), count=count).view(bool), data[nbytes:]


def _escaped(numbers: np.ndarray) -> list[bytes]:
    """Write numbers below 2^31 that did not fit, and before them how many."""
    return [_COUNT.pack(len(numbers)), numbers.astype("<i4").tobytes()]


def _unescaped(data: bytes, numbers: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Put numbers that did not fit where they belong, and return what follows."""
    count, nbytes = int(where.sum()), 4 * int(where.sum())
    if len(data) < _COUNT.size + nbytes or _COUNT.unpack_from(data)[0] != count:
        raise GradlabError(f"levels: not as many large numbers as {count} bytes announce")
    if count:
        numbers[where] = np.frombuffer(data, "<i4", count, _COUNT.size)
    return numbers, data[_COUNT.size + nbytes :]


# --- denser layers -------------------------------------------------------------------------------------------------


def _spans(layers: _Layers) -> list[tuple[int, int]]:
    """List where dense layers begin and end."""
    return [(int(layers.edges[at]), int(layers.edges[at + 1])) for at in np.flatnonzero(layers.dense)]


def _numbers(positions: np.ndarray, levels: np.ndarray, layers: _Layers) -> list[bytes]:
    within, total = _within(positions, layers)
    codes = np.full(total, _MIDDLE, np.uint8)
    large = np.abs(levels) > _MIDDLE
    codes[within] = np.where(large, 255, levels + _MIDDLE).astype(np.uint8)
    return [deflated(codes, CODES_ALONE), *_escaped(levels[large])]


def _from_numbers(data: bytes, layers: _Layers) -> tuple[np.ndarray, np.ndarray, bytes]:
    spans = _spans(layers)
    found, rest = inflated(data, sum(stop - start for start, stop in spans), "levels: dense codes")
    codes = np.frombuffer(found, np.uint8)
    within = np.flatnonzero(codes != _MIDDLE)
    levels = codes[within].astype(np.int64) - _MIDDLE
    levels, rest = _unescaped(rest, levels, levels == 255 - _MIDDLE)
    if (np.abs(levels) > LARGEST).any() or (levels == 0).any():
        raise GradlabError(f"levels: a magnitude of 0 or beyond {LARGEST}")
    counted = np.add.reduceat(codes != _MIDDLE, np.cumsum([0, *(stop - start for start, stop in spans[:-1])]))
    if (counted != layers.counts[layers.dense]).any():
        raise GradlabError("levels: a dense layer has not as many numbers as it announces")
    starts = np.array([start for start, _ in spans])
    firsts = np.cumsum([0, *(stop - start for start, stop in spans[:-1])])
    return within + np.repeat(starts - firsts, counted), levels.astype(np.int32), rest


def _within(positions: np.ndarray, layers: _Layers) -> tuple[np.ndarray, int]:
    """Count positions through the dense layers alone; and their elements."""
    spans = _spans(layers)
    starts = np.array([start for start, _ in spans])
    lengths = np.array([stop - start for start, stop in spans])
    firsts = np.cumsum(lengths) - lengths
    return positions - np.repeat(starts - firsts, layers.counts[layers.dense]), int(lengths.sum())
