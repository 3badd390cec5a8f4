"""Codes of a few bits each, packed into bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

PIECE = 2**18  # codes worked on at a time on the CPU: they stay in the cache, and calls cost little beside them
_NUMBERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by their bytes
_TOGETHER = {1: 0x0102040810204080, 2: 0x01041040, 4: 0x0110}  # by width
_WIDER = {4: 0x0F0F, 2: 0x0303}  # by width of two codes in a pair of bytes: the bits that they have there


@functools.cache
def fields(bits: int) -> tuple[int, ...]:
    """Split a number of bits into whole bytes and then smaller powers of two: 22 -> 8, 8, 4, 2."""
    return (8,) * (bits // 8) + tuple(width for width in (4, 2, 1) if bits & width)


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` packed codes of `bits` bits each.

    >>> from gradlab.codec import packed_bytes
    >>> packed_bytes(1000, bits=3)
    375
    """
    return -(-numel // 8) * bits


class Packer:
    """Packs codes of `bits` bits part by part, as `pack` does it."""

    def __init__(self, numel: int, bits: int, device: torch.device) -> None:
        self.packed = torch.empty(packed_bytes(numel, bits), dtype=torch.uint8, device=device)
        self._bits = bits

    def write(self, start: int, codes: torch.Tensor) -> None:
        """Pack a part of the codes from `start`, a multiple of 8: uint8, or int64 for more than 8 bits. Unless the part
        is the last one, it has a multiple of 8 codes."""
        if missing := -codes.numel() % 8:
            codes = torch.nn.functional.pad(codes, (0, missing))
        stop, bits = start + codes.numel(), self._bits
        if fields(bits) == (bits,):
            _fold(codes, self.packed[start // 8 * bits : stop // 8 * bits], bits)
            return
        planes, rest, bits = _cut_bytes(self.packed, bits)
        if whole := len(planes):
            columns = codes.view(torch.uint8).view(-1, 8)
            planes[:, start:stop] = columns[:, :whole].T
            codes = columns[:, whole].contiguous() if bits else codes[:0]
        shift = 0
        for width, plane in _planes(rest, bits):
            field = codes.bitwise_right_shift(shift) if shift else codes
            if shift + width < bits:
                field = field.bitwise_and(2**width - 1)
            _fold(field.to(torch.uint8), plane[start // 8 * width : stop // 8 * width], width)
            shift += width


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of a few bits each into bytes.

    The bits of a code are cut into the fields of `fields`, low bits first. All codes' parts of one field lie together:
    code i has those from bit i * width of its plane on. Codes from a multiple of 8 on can thus be cut off, see `cut`.

    >>> from gradlab.codec import pack, unpack
    >>> packed = pack(torch.tensor([1, 3, 0, 2], dtype=torch.uint8), bits=2)
    >>> packed.shape, unpack(packed, bits=2)[:4]
    (torch.Size([2]), tensor([1, 3, 0, 2], dtype=torch.uint8))

    Args:
        codes: (numel,), below 2^bits, uint8, or int64 for more than 8 bits.
        bits: width of each code.

    Returns:
        (ceil(numel / 8) * bits,), uint8.
    """
    packer = Packer(len(codes), bits, codes.device)
    step = PIECE if codes.device.type == "cpu" else max(1, len(codes))
    for start in range(0, len(codes), step):
        packer.write(start, codes[start : start + step])
    return packer.packed


def unpack(packed: torch.Tensor, bits: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Unpack what `pack` returned, or a part of it.

    >>> from gradlab.codec import pack, unpack
    >>> unpack(pack(torch.arange(16, dtype=torch.uint8), bits=4), bits=4, start=8, stop=11)
    tensor([ 8,  9, 10], dtype=torch.uint8)

    Args:
        packed: the bytes.
        bits: width of each code.
        start: the first code wanted, a multiple of 8.
        stop: the end of the codes wanted; None: all that there are.

    Returns:
        Codes, uint8, or int64 for more than 8 bits; without `stop` up to seven more than were packed.
    """
    numel = 8 * (packed.numel() // max(1, bits))
    stop = numel if stop is None else stop
    end = stop + -stop % 8
    if fields(bits) == (bits,):
        alone = _unfold(packed[start // 8 * bits : end // 8 * bits], bits)
        return alone if stop == end else alone[: stop - start]
    planes, rest, bits = _cut_bytes(packed, bits)
    codes, shift = None, 0
    for width, plane in _planes(rest, bits):
        field = _unfold(plane[start // 8 * width : end // 8 * width], width)
        codes = field if codes is None else codes.bitwise_or_(field.mul_(2**shift))
        shift += width
    if codes is None:
        codes = packed.new_zeros(end - start)
    if len(planes):
        wide = packed.new_zeros(end - start, dtype=torch.int64)
        columns = wide.view(torch.uint8).view(-1, 8)
        columns[:, : len(planes)] = planes[:, start:end].T
        if bits:
            columns[:, len(planes)] = codes
        codes = wide
    return codes[: stop - start]


def cut(packed: torch.Tensor, bits: int, bounds: Sequence[int]) -> list[torch.Tensor]:
    """Cut packed codes into those between two bounds each, as `pack` returns them. Bounds are ascending multiples of 8;
    the last one may be larger than the number of codes."""
    of_planes = [
        [plane[first // 8 * width : -(-last // 8) * width] for first, last in pairwise(bounds)]
        for width, plane in _planes(packed, bits)
    ]
    if len(of_planes) == 1:
        return of_planes[0]
    return [torch.cat(parts) for parts in zip(*of_planes, strict=True)]


def join(parts: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
    """Invert `cut`: the packed codes of all parts. Each but the last stands for a multiple of 8 codes."""
    of_parts = [[plane for _, plane in _planes(part, bits)] for part in parts]
    return torch.cat([plane for planes in zip(*of_parts, strict=True) for plane in planes])


def _cut_bytes(packed: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Cut packed codes of more than 8 bits into their whole bytes, (bytes, numel), packed codes of the rest, (n,), and
    its number of bits. Codes up to 8 bits are not cut."""
    whole = bits // 8 if bits > 8 else 0
    numel = 8 * (packed.numel() // max(1, bits))
    return packed[: whole * numel].view(whole, numel), packed[whole * numel :], bits - 8 * whole


def _planes(packed: torch.Tensor, bits: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The width of each field, and the bytes that hold it of all codes."""
    groups, first = packed.numel() // max(1, bits), 0
    for width in fields(bits):
        yield width, packed[first : first + width * groups]
        first += width * groups


def _fold(field: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """Pack bytes below 2^width, eight or a multiple of them."""
    if width == 8:
        out.copy_(field)
    elif field.device.type == "cpu":
        out.numpy()[:] = fold_by_numpy(field.numpy(), width)
    else:
        out.copy_(fold_by_torch(field, width))


def _unfold(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack what `_fold` packed."""
    if width == 8:
        return packed
    if packed.device.type == "cpu":
        return torch.from_numpy(unfold_by_numpy(packed.numpy(), width))
    return unfold_by_torch(packed, width)


def fold_by_torch(field: torch.Tensor, width: int) -> torch.Tensor:
    """Pack bytes (n,) below 2^width, width 1, 2 or 4: (n * width / 8,). It is the GPU's way: a number of packed bytes
    times `_TOGETHER` has all of them in its highest byte."""
    wide = _NUMBERS[8 // width]
    if field.storage_offset() % (8 // width):
        field = field.clone()
    return field.view(wide).mul(_TOGETHER[width]).bitwise_right_shift_(8 * (8 // width) - 8).to(torch.uint8)


def unfold_by_torch(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Invert `fold_by_torch`."""
    return (packed[:, None] >> _shifts(width, packed.device) & 2**width - 1).view(-1)


@functools.cache
def _shifts(width: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, width, dtype=torch.uint8, device=device)


def fold_by_numpy(field: np.ndarray, width: int) -> np.ndarray:
    """Do what `fold_by_torch` does, on a CPU in a third of the time: two neighbours move in one 16-bit number."""
    if width == 1:
        return np.packbits(field, bitorder="little")
    pairs = field.view("<u2")
    joined = (pairs | pairs >> (8 - width)).astype(np.uint8)
    return joined if width == 4 else fold_by_numpy(joined, 2 * width)


def unfold_by_numpy(packed: np.ndarray, width: int) -> np.ndarray:
    """Invert `fold_by_numpy`."""
    if width == 1:
        return np.unpackbits(packed, bitorder="little")
    pairs = (packed if width == 4 else unfold_by_numpy(packed, 2 * width)).astype("<u2")
    pairs |= pairs * np.uint16(2 ** (8 - width))
    pairs &= np.uint16(_WIDER[width])
    return pairs.view(np.uint8)
