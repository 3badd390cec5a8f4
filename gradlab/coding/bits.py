"""Codes of a few bits each, packed into bytes."""

from __future__ import annotations

import torch


def fields(bits: int) -> list[int]:
    """Split a number of bits into whole bytes and then smaller powers of two: 22 -> 8, 8, 4, 2."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed_bytes(numel: int, bits: int) -> int:
    """Return the bytes of `numel` packed codes of `bits` bits each."""
    return -(-numel // 8) * bits


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of a few bits each into bytes.

    The bits of a code are cut into the fields of `fields`, low bits first. All codes' parts of one field are packed
    together: their vector is folded in halves until its bytes are full. Every operation thus runs over contiguous
    memory.

    Args:
        codes: (numel,), below 2^bits, uint8, or int64 for more than 8 bits.
        bits: of each code.

    Returns:
        (ceil(numel / 8) * bits,), uint8.
    """
    codes = torch.nn.functional.pad(codes, (0, -codes.numel() % 8))
    packed = [codes.new_empty(0, dtype=torch.uint8)]
    shift = 0
    for width in fields(bits):
        rest = codes.bitwise_right_shift(shift) if shift else codes
        field = rest.bitwise_and(2**width - 1).to(torch.uint8)
        shift += width
        while width < 8:
            low, high = field.view(2, field.numel() // 2)
            field = low | high << width
            width *= 2
        packed.append(field)
    return torch.cat(packed)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack what `pack` returned.

    Returns:
        Codes, up to seven more than were packed, uint8, or int64 for more than 8 bits.
    """
    groups = packed.numel() // max(1, bits)
    codes = packed.new_zeros(8 * groups, dtype=torch.uint8 if bits <= 8 else torch.int64)
    shift = 0
    for width, field in zip(fields(bits), packed.split([width * groups for width in fields(bits)]), strict=True):
        full = 8
        while full > width:
            full //= 2
            field = torch.cat([field & 2**full - 1, field >> full])
        codes |= field.to(codes.dtype) << shift
        shift += width
    return codes
