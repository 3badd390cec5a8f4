"""Codes of a few bits each, packed into bytes."""

from __future__ import annotations

import torch


def fields(bits: int) -> list[int]:
    """Whole bytes, then the powers of two in what is left of a number of bits: 22 -> 8, 8, 4, 2."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed_bytes(numel: int, bits: int) -> int:
    """Bytes of `numel` packed codes of `bits` bits."""
    return -(-numel // 8) * bits


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes below 2^bits, (numel,), into a vector of ceil(numel / 8) * bits bytes, uint8.

    Bits go field by field, low ones first. The vector of a field is folded in halves until bytes are full, so that
    every operation runs over contiguous memory.

    codes: uint8, or int64 beyond 8 bits.
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
    """The inverse of `pack`: codes, uint8 or (beyond 8 bits) int64, up to seven more of them than were packed."""
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
