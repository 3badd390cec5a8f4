"""Encode whole numbers that are mostly zero as bytes, near their entropy.

A layer in which at most two fifths of the numbers are other than zero is sent as gaps: how many zeros stand before each
of these. The class of a gap's high part and the class of a magnitude are a byte that gets a Huffman code. Places
within classes, low bits of gaps, and signs are nearly uniform and are sent as they are. The number of low bits follows
from the layer's share of zeros, so that gaps of layers whose shares differ share one table. A denser layer is
sent number by number: a byte of one number or two gets a Huffman code. Larger numbers are escaped and take four bytes.

Large layers are cut into parts, and parts and layers in a row make blocks that fit the cache and decode by themselves.
Tables come with the bytes, as DEFLATE writes them anew for every 32 thousand codes or so. Nothing has to be known but
the layers' sizes. If both sides know how often bytes occurred in each layer before, tables follow from that. A layer
that its table does not fit is sent with its own (`gradlab.coding.huffman`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gradlab.coding.deflate import CODES_ALONE, MATCHES, deflated, inflated
from gradlab.coding.huffman import SYMBOLS, coded, uncoded
from gradlab.coding.threads import each
from gradlab.errors import GradlabError

LARGEST = 2**30  # magnitude
_KEPT = 2  # binary digits of the mean gap that its high part has
# The least number of each class, and how many bits say where in its class a number is; the last class has no end.
_LEAST = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64, 128, 256], np.int32)
_INSIDE = np.array([0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 3, 3, 5, 6, 7, 0], np.uint8)
_ENDLESS = len(_LEAST) - 1
_ALONE = 8  # the first class that is not of one number alone
_CLASS = (np.searchsorted(_LEAST, np.arange(_LEAST[-1] + 1), "right") - 1).astype(np.uint8)  # of 0 to 256
_MIDDLE = 127  # byte of a zero in a dense layer; 255 stands for a number in four bytes
_PAIRED = 7  # half a byte of a zero, where two numbers share a byte; 15 stands for a number in four bytes
_FEW = 200  # so many numbers up to 7 for each larger one, and two share a byte
_OF_GAPS, _OF_PAIRS, _OF_NUMBERS = range(3)  # what bytes are codes of
FREQUENCIES = (3, SYMBOLS)  # of the bytes of a layer, by what they are codes of
_COUNT, _HEADER = struct.Struct("<I"), struct.Struct("<II")
_PART, _BLOCK = 2**18, 2**16  # elements of a layer's part, and numbers other than zero that a block holds


@dataclass(frozen=True)
class _Layers:
    """How the numbers of a block's layers, or parts of layers, are sent.

    edges: beginnings of layers in the block, and its end: (L + 1,).
    counts: numbers other than zero of each layer, (L,).
    dense: whether a layer is sent number by number, (L,).
    low_bits: low bits of the gaps of each layer, (L,).
    """

    edges: np.ndarray
    counts: np.ndarray
    dense: np.ndarray
    low_bits: np.ndarray

    @property
    def in_dense(self) -> np.ndarray:
        """Whether each number other than zero lies in a dense layer."""
        return np.repeat(self.dense, self.counts)


def _layers(edges: np.ndarray, counts: np.ndarray) -> _Layers:
    numels = np.diff(edges)
    mean_gap = np.maximum(1, numels // np.maximum(1, counts))
    low_bits = np.maximum(0, np.frexp(mean_gap.astype(np.float64))[1] - 1 - _KEPT).astype(np.uint8)
    return _Layers(edges, counts, 5 * counts > 2 * numels, low_bits)


def ones_and_all(frequencies: np.ndarray) -> tuple[int, int]:
    """Count the numbers of magnitude 1, and all that are not zero, in frequencies of the shape `FREQUENCIES`."""
    gaps = frequencies[_OF_GAPS].reshape(16, 16)
    by_half = frequencies[_OF_PAIRS].reshape(16, 16).sum(0) + frequencies[_OF_PAIRS].reshape(16, 16).sum(1)
    numbers = frequencies[_OF_NUMBERS]
    of_one = by_half[[_PAIRED - 1, _PAIRED + 1]].sum() + numbers[[_MIDDLE - 1, _MIDDLE + 1]].sum()
    of_all = by_half.sum() - by_half[_PAIRED] + numbers.sum() - numbers[_MIDDLE]
    return int(gaps[:, 0].sum() + of_one), int(gaps.sum() + of_all)


class _Codes:
    """The coding of a block's bytes, and how often each occurred.

    owners: the layer of each of the block's parts of layers, (P,).
    known: frequencies that both sides know, by layer, each (3, 256); None: tables come with the bytes.
    """

    def __init__(self, owners: np.ndarray, known: Sequence[np.ndarray] | None) -> None:
        self._owners, self._known = owners, known
        self.seen: list[
            tuple[int, int, np.ndarray]
        ] = []  # layers, kinds and frequencies (256,), where tables are known

    def written(self, codes: np.ndarray, ends: np.ndarray, kind: int) -> bytes:
        """Write codes, uint8. ends: where each part's are over, (P,)."""
        if self._known is None:
            return deflated(codes, CODES_ALONE)
        return b"".join(
            coded(codes[first:last], self._known[layer][kind]) for layer, first, last in self._of_layers(ends)
        )

    def read(self, data: bytes, ends: np.ndarray, kind: int, what: str) -> tuple[np.ndarray, bytes]:
        """Read what `written` wrote, and return what follows."""
        if self._known is None:
            found, rest = inflated(data, int(ends[-1]), what)
            return np.frombuffer(found, np.uint8), rest
        codes, rest = np.empty(int(ends[-1]), np.uint8), data
        for layer, first, last in self._of_layers(ends):
            found, rest = uncoded(rest, last - first, self._known[layer][kind], what)
            codes[first:last] = np.frombuffer(found, np.uint8)
            self.seen.append((layer, kind, np.bincount(codes[first:last], minlength=SYMBOLS)))
        return codes, rest

    def _of_layers(self, ends: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yield layers that have codes, and where these begin and end."""
        lasts = np.flatnonzero(np.diff(self._owners, append=-1))
        for layer, (first, last) in zip(self._owners[lasts], pairwise([0, *ends[lasts].tolist()]), strict=True):
            if last > first:
                yield int(layer), first, last


def encode_levels(
    positions: np.ndarray, levels: np.ndarray, sizes: Sequence[int], known: Sequence[np.ndarray] | None = None
) -> bytes:
    """Encode levels other than zero, int32 up to `LARGEST`, and ascending positions, int64, (count,) each, as blocks of
    layers or parts of layers, after how many these are and its bytes.

    known: frequencies that the decoder knows too, by layer, each of the shape `FREQUENCIES`, whole numbers from 0;
        None: tables come with the bytes.
    """
    edges, owners = _edges(sizes)
    ends = np.searchsorted(positions, edges)

    def written(block: tuple[int, int]) -> bytes:
        first, last = block
        part, of_part = slice(ends[first], ends[last]), edges[first : last + 1] - edges[first]
        data = _block(positions[part] - edges[first], levels[part], of_part, _Codes(owners[first:last], known))
        return _HEADER.pack(last - first, len(data)) + data

    return b"".join(each(written, list(_blocks(ends))))


def _blocks(ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut layers into blocks, [first, last) each, of as many as hold so many numbers together; `ends` counts the
    numbers before each layer, and all of them."""
    first = 0
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + _BLOCK, "right")) - 1)
        yield first, last
        first = last


def decode_levels(
    data: bytes,
    sizes: Sequence[int],
    known: Sequence[np.ndarray] | None = None,
    seen: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Decode the bytes of `encode_levels` to ascending positions (count,), int64, and levels (count,), int32.

    known: tables as the encoder had them.
    seen: counts by layer, of the shape `FREQUENCIES`, to which those of these bytes are added, if tables are known.
    """
    edges, owners = _edges(sizes)

    def read(block: tuple[bytes, int, int]) -> tuple[np.ndarray, np.ndarray, _Codes]:
        message, first, last = block
        codes = _Codes(owners[first:last], known)
        found, there = _from_block(message, edges[first : last + 1] - edges[first], codes)
        return found + edges[first], there, codes

    found = each(read, list(_cut(data, len(edges) - 1)))
    if seen is not None:
        for layer, kind, frequencies in (one for *_, codes in found for one in codes.seen):
            seen[layer][kind] += frequencies
    positions = np.concatenate([np.zeros(0, np.int64), *(there for there, _, _ in found)])
    return positions, np.concatenate([np.zeros(0, np.int32), *(levels for _, levels, _ in found)])


def _cut(data: bytes, layers: int) -> Iterator[tuple[bytes, int, int]]:
    """Cut a message into its blocks: the bytes of each, and the first and the last of its layers, exclusive."""
    first = at = 0
    while first < layers:
        count, nbytes = _HEADER.unpack_from(data, at) if len(data) >= at + _HEADER.size else (0, 0)
        if not 0 < count <= layers - first or len(data) < at + _HEADER.size + nbytes:
            raise GradlabError(f"levels: a block of {count} layers, expected 1 to {layers - first}, and whole")
        at += _HEADER.size
        yield data[at : at + nbytes], first, first + count
        first, at = first + count, at + nbytes
    if at < len(data):
        raise GradlabError(f"levels: {len(data) - at} bytes more than there should be")


def _edges(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Cut layers into P parts whose work fits the cache: return where parts begin, and the end, (P + 1,), and the layer
    of each, (P,)."""
    lengths = [min(_PART, size - start) for size in sizes for start in range(0, max(1, size), _PART)]
    owners = np.repeat(np.arange(len(sizes)), [max(1, -(-size // _PART)) for size in sizes])
    return np.concatenate([[0], np.cumsum(np.array(lengths, np.int64))]), owners


def _block(positions: np.ndarray, levels: np.ndarray, edges: np.ndarray, codes: _Codes) -> bytes:
    """Encode one block. edges: of its layers."""
    layers = _layers(edges, np.diff(np.searchsorted(positions, edges)))
    counts = deflated(np.ascontiguousarray(layers.counts.astype("<u4").view(np.uint8).reshape(-1, 4).T), MATCHES)
    in_dense = layers.in_dense
    if not in_dense.any():
        return b"".join([counts, *_gaps(positions, levels, layers, codes)])
    sparse, of_dense = ~in_dense, _numbers(positions[in_dense], levels[in_dense], layers, codes)
    return b"".join([counts, *_gaps(positions[sparse], levels[sparse], layers, codes), *of_dense])


def _from_block(data: bytes, edges: np.ndarray, codes: _Codes) -> tuple[np.ndarray, np.ndarray]:
    """Decode one block."""
    sizes = np.diff(edges)
    planes, rest = inflated(data, 4 * len(sizes), "levels: counts")
    counts = np.frombuffer(planes, np.uint8).reshape(4, -1).T.copy().view("<u4").reshape(-1).astype(np.int64)
    if (counts > sizes).any():
        worst = int(np.argmax(counts - sizes))
        raise GradlabError(f"levels: {counts[worst]} numbers in layer {worst}, expected at most {sizes[worst]}")
    layers = _layers(edges, counts)
    positions, levels, rest = _from_gaps(rest, layers, codes)
    if layers.dense.any():
        of_dense, levels_there, rest = _from_numbers(rest, layers, codes)
        positions, levels = (
            _merged(layers.in_dense, *pair) for pair in ((positions, of_dense), (levels, levels_there))
        )
    if rest:
        raise GradlabError(f"levels: {len(rest)} bytes more in a block than there should be")
    return positions, levels


def _merged(in_dense: np.ndarray, sparse: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """Put what belongs to dense layers where these are."""
    merged = np.empty(len(in_dense), sparse.dtype)
    merged[~in_dense], merged[in_dense] = sparse, dense
    return merged


# --- layers that are mostly zero -----------------------------------------------------------------------------------


def _gaps(positions: np.ndarray, levels: np.ndarray, layers: _Layers, codes: _Codes) -> list[bytes]:
    gaps, shifts = _gaps_before(positions, layers), _low_bits(layers)
    more = np.abs(levels) - 1
    of_gaps, of_more = _classes(gaps >> shifts), _classes(more)  # numbers and shifts of 32 and 8 bits: half the time
    return [
        codes.written(of_gaps * np.uint8(16) + of_more, np.cumsum(_of_gaps(layers)), _OF_GAPS),
        np.packbits(levels < 0).tobytes(),
        *_in_classes(gaps, of_gaps, shifts),
        *_in_classes(more, of_more, np.zeros_like(shifts)),
    ]


def _from_gaps(data: bytes, layers: _Layers, codes: _Codes) -> tuple[np.ndarray, np.ndarray, bytes]:
    shifts = _low_bits(layers)
    joined, rest = codes.read(data, np.cumsum(_of_gaps(layers)), _OF_GAPS, "levels: codes")
    negative, rest = _bits(rest, len(shifts))
    gaps, rest = _of_classes(rest, joined >> 4, shifts)
    more, rest = _of_classes(rest, joined & 15, np.zeros_like(shifts))
    if len(more) and (more.min() < 0 or more.max() >= LARGEST):
        raise GradlabError(f"levels: a magnitude beyond {LARGEST}")
    return _positions(gaps, layers), (more + 1) * (1 - 2 * negative.view(np.int8)), rest


def _classes(numbers: np.ndarray) -> np.ndarray:
    """Return the class of each number, uint8."""
    return _CLASS.take(numbers, mode="clip")


def _in_classes(numbers: np.ndarray, classes: np.ndarray, shifts: np.ndarray) -> list[bytes]:
    """Write where numbers are in the classes of their high parts, and those of the class without an end."""
    told = (classes >= _ALONE) | (shifts > 0)
    if not told.all():  # the class of the others says it all
        return _in_classes(numbers[told], classes[told], shifts[told])
    endless, widths = _widths(classes, shifts)
    return [*_planes(numbers - (_LEAST.take(classes) << shifts), widths), *_escaped(numbers[endless])]


def _of_classes(data: bytes, classes: np.ndarray, shifts: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Invert `_in_classes`, and return what follows."""
    told = (classes >= _ALONE) | (shifts > 0)
    if not told.all():
        numbers, there = _LEAST.take(classes), np.flatnonzero(told)
        numbers[there], data = _of_classes(data, classes[there], shifts[there])
        return numbers, data
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


def _moved(layers: _Layers) -> tuple[np.ndarray, np.ndarray, int]:
    """Lay dense layers end to end: where each begins then, how far it is moved for that, and their elements."""
    starts, lengths = layers.edges[:-1][layers.dense], np.diff(layers.edges)[layers.dense]
    firsts = np.cumsum(lengths) - lengths
    return firsts, starts - firsts, int(lengths.sum())


def _ends(layers: _Layers, paired: bool) -> np.ndarray:
    """Return where each layer's bytes are over. A byte of two layers is the first one's."""
    ends = np.cumsum(np.where(layers.dense, np.diff(layers.edges), 0))
    return -(-ends // 2) if paired else ends


def _numbers(positions: np.ndarray, levels: np.ndarray, layers: _Layers, coding: _Codes) -> list[bytes]:
    """Write dense layers: two numbers to a byte where next to all fit that, else one."""
    _, moved, total = _moved(layers)
    within = positions - np.repeat(moved, layers.counts[layers.dense])
    paired = bool(_FEW * np.count_nonzero(np.abs(levels) > _PAIRED) <= len(levels))
    middle, kind = (_PAIRED, np.uint8(15)) if paired else (_MIDDLE, np.uint8(255))
    codes = np.full(total + (total & 1 if paired else 0), middle, np.uint8)
    large = np.abs(levels) > middle
    codes[within] = np.where(large, kind, levels + middle).astype(np.uint8)
    written = codes[0::2] << 4 | codes[1::2] if paired else codes
    coded_here = coding.written(written, _ends(layers, paired), _OF_PAIRS if paired else _OF_NUMBERS)
    return [bytes([paired]), coded_here, *_escaped(levels[large])]


def _from_numbers(data: bytes, layers: _Layers, coding: _Codes) -> tuple[np.ndarray, np.ndarray, bytes]:
    (firsts, moved, total), paired = _moved(layers), data[:1] == b"\1"
    kind = _OF_PAIRS if paired else _OF_NUMBERS
    codes, rest = coding.read(data[1:], _ends(layers, paired), kind, "levels: dense codes")
    if paired:
        codes = np.stack([codes >> 4, codes & 15], 1).reshape(-1)[:total]
    middle, large = (_PAIRED, 15) if paired else (_MIDDLE, 255)
    other = codes != middle
    within = np.flatnonzero(other)
    levels = codes[within].astype(np.int32)
    there = levels == large
    levels, rest = _unescaped(rest, levels - middle, there)
    if len(levels) and ((np.abs(levels.astype(np.int64)) > LARGEST).any() or (levels == 0).any()):
        raise GradlabError(f"levels: a magnitude of 0 or beyond {LARGEST}")
    counted = np.add.reduceat(other, firsts, dtype=np.int64)
    if (counted != layers.counts[layers.dense]).any():
        raise GradlabError("levels: a dense layer has not as many numbers as it announces")
    return within + np.repeat(moved, counted), levels, rest
