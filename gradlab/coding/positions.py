"""Encode the positions of a few elements out of many as bytes, in one of four codings or the smallest of them.

raw       4 bytes each (8 from 2^31 elements on)
packed    ceil(log2 numel) bits each
bitmap    one bit for each of the numel elements
deflate   the gaps between positions in ascending order, byte plane by byte plane, deflated where that makes them
          smaller: within a tenth of the entropy of random positions (8.1 bits each at a density of 1 %), and below it
          if positions cluster
fixed     the smallest of the first three: its size follows from count and numel, so that no rank has to send it
smallest  the smallest of all four, with a byte that says which; its size depends on the positions
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from gradlab.coding.bits import cut, join, pack, packed_bytes, unpack
from gradlab.coding.deflate import deflated, inflated
from gradlab.errors import GradlabError

CODINGS = ("fixed", "smallest", "raw", "packed", "bitmap", "deflate")
_OF_KNOWN_SIZE = ("packed", "raw", "bitmap")
_ALL = (*_OF_KNOWN_SIZE, "deflate")


def varies(coding: str) -> bool:
    """Return whether a coding's size depends on the positions."""
    return coding in ("deflate", "smallest")


def in_order(coding: str, count: int, numel: int) -> bool:
    """Return whether a coding needs positions in ascending order."""
    return chosen(coding, count, numel) not in ("raw", "packed")


def index_bytes(coding: str, count: int, numel: int) -> int:
    """Return the bytes of `count` encoded positions below `numel`.

    If the size depends on the positions, it is that of random ones.

    >>> from gradlab.codec import index_bytes
    >>> index_bytes("packed", count=10, numel=1000), index_bytes("fixed", count=10, numel=1000)
    (20, 20)
    """
    return _random_positions_bytes(coding, count, numel) if varies(coding) else _known_bytes(coding, count, numel)


def encode(positions: torch.Tensor, numel: int, coding: str) -> torch.Tensor:
    """Encode positions as bytes.

    >>> from gradlab.codec import decode, encode
    >>> encoded = encode(torch.tensor([3, 70, 99]), numel=100, coding="packed")
    >>> encoded.dtype, decode(encoded, count=3, numel=100, coding="packed")
    (torch.uint8, tensor([ 3, 70, 99]))

    Args:
        positions: (count,), int64, below numel, in ascending order if `in_order` requires it.
        numel: number of elements that positions point into.
        coding: one of `CODINGS`.

    Returns:
        (bytes,), uint8.
    """
    coding = chosen(coding, len(positions), numel)
    if coding != "smallest":
        return _ENCODE[coding](positions, numel)
    known = min(_OF_KNOWN_SIZE, key=lambda one: _known_bytes(one, len(positions), numel))
    deflated = _deflated(positions, numel)
    if len(deflated) < _known_bytes(known, len(positions), numel):
        known, encoded = "deflate", deflated
    else:
        encoded = _ENCODE[known](positions, numel)
    return torch.cat([encoded.new_tensor([_ALL.index(known)]), encoded])


def encode_rows(rows: torch.Tensor, numel: int, coding: str) -> list[torch.Tensor]:
    """Encode each row of positions (m, count) as `encode` does, packed ones in a few calls for all of them."""
    count, width = rows.shape[1], _width(numel)
    if not count or not width or chosen(coding, count, numel) != "packed":
        return [encode(row, numel, coding) for row in rows]
    whole = -(-count // 8) * 8  # codes can be cut off at a multiple of 8
    codes = torch.nn.functional.pad(rows, (0, whole - count)).view(-1)
    packed = pack(codes if width > 8 else codes.to(torch.uint8), width)
    return cut(packed, width, range(0, len(codes) + 1, whole))


def decode(encoded: torch.Tensor, count: int, numel: int, coding: str) -> torch.Tensor:
    """Decode what `encode` returned.

    >>> from gradlab.codec import decode, encode
    >>> decode(encode(torch.tensor([3, 70]), 100, "smallest"), count=2, numel=100, coding="smallest")
    tensor([ 3, 70])

    Args:
        encoded: (bytes,), uint8.
        count: number of positions.
        numel: number of elements that positions point into.
        coding: one of `CODINGS`.

    Returns:
        Positions (count,), int64.

    Raises:
        GradlabError: for bytes that do not stand for `count` positions below numel.
    """
    coding = chosen(coding, count, numel)
    if coding == "smallest":
        if not len(encoded) or int(encoded[0]) >= len(_ALL):
            raise GradlabError(f"positions: coding {encoded[:1].tolist()}, expected one of 0 to {len(_ALL) - 1}")
        coding, encoded = _ALL[int(encoded[0])], encoded[1:]
    if not varies(coding) and len(encoded) != (nbytes := _known_bytes(coding, count, numel)):
        raise GradlabError(f"positions: {len(encoded)} bytes ({coding}), expected {nbytes} for {count} below {numel}")
    positions = _DECODE[coding](encoded, count, numel)
    if len(positions) != count:
        raise GradlabError(f"positions: {len(positions)}, expected {count} below {numel}")
    return positions if coding == "bitmap" else below(positions, numel)


def below(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """Return positions, int64, that another rank sent, all inside a vector (numel,). A position beyond an end
    raises GradlabError on a CPU. A GPU would have to wait for that check: there it becomes the nearest end."""
    if positions.device.type != "cpu":
        return positions.clamp_(0, max(0, numel - 1))
    if positions.numel():
        least, most = map(int, positions.aminmax())
        if least < 0 or most >= numel:
            raise GradlabError(f"positions: {least} to {most}, expected {positions.numel()} below {numel}")
    return positions


def decode_all(messages: Sequence[torch.Tensor], count: int, numel: int, coding: str) -> list[torch.Tensor]:
    """Decode several ranks' messages of as many positions each, (count,), int64, in one pass where their bytes say
    where each begins."""
    width = _width(numel)
    one_pass = len(messages) > 1 and count and width and chosen(coding, count, numel) == "packed"
    if not one_pass or any(len(message) != packed_bytes(count, width) for message in messages):
        return [decode(message, count, numel, coding) for message in messages]
    # Each stands for a multiple of 8 codes: those beyond `count` are zeros.
    every = unpack(join(messages, width), width).long().view(len(messages), -1)[:, :count]
    return list(below(every, numel))


@functools.lru_cache(maxsize=4096)
def chosen(coding: str, count: int, numel: int) -> str:
    """Return the coding that "fixed" stands for at these numbers; any other coding as it is."""
    if coding != "fixed":
        return coding
    return min(_OF_KNOWN_SIZE, key=lambda one: _known_bytes(one, count, numel))


def _width(numel: int) -> int:
    """Bits of a position below numel."""
    return max(0, numel - 1).bit_length()


def code_size(coding: str, numel: int) -> tuple[int, int]:
    """Return a position's bits, and the bytes from one to the next, in a coding of known size; of packed bits 1."""
    raw = _raw_dtype(numel).itemsize
    return {"packed": (_width(numel), 1), "bitmap": (1, 1), "raw": (8 * raw, raw)}[coding]


def _raw_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 2**31 else torch.int64


def _known_bytes(coding: str, count: int, numel: int) -> int:
    sizes = {"raw": count * _raw_dtype(numel).itemsize, "packed": packed_bytes(count, _width(numel))}
    sizes["bitmap"] = packed_bytes(numel, 1)
    return min(sizes.values()) if coding == "fixed" else sizes[coding]


@functools.lru_cache(maxsize=4096)
def _random_positions_bytes(coding: str, count: int, numel: int) -> int:
    return len(random_encoded(coding, count, numel))


@functools.lru_cache(maxsize=64)
def random_encoded(coding: str, count: int, numel: int) -> torch.Tensor:
    """Encode `count` random positions below `numel`, the same ones in every process: (bytes,), uint8."""
    draws = np.random.default_rng(0)
    positions = np.sort(draws.choice(numel, count, replace=False, shuffle=False)) if count else np.zeros(0, np.int64)
    return encode(torch.from_numpy(positions), numel, coding)


# --- the codings ---------------------------------------------------------------------------------------------------


def _raw(positions: torch.Tensor, numel: int) -> torch.Tensor:
    # Empty tensors made from numpy arrays have no stride, which a view needs.
    return positions.new_empty(len(positions), dtype=_raw_dtype(numel)).copy_(positions).view(torch.uint8)


def _from_raw(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    # A copy: what arrives in one message with others may lie anywhere.
    return encoded.clone().view(_raw_dtype(numel)).to(torch.int64)


def _packed(positions: torch.Tensor, numel: int) -> torch.Tensor:
    width = _width(numel)
    return pack(positions.to(torch.uint8) if width <= 8 else positions, width)


def _from_packed(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    width = _width(numel)
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=encoded.device)
    return unpack(encoded, width)[:count].to(torch.int64)


def _bitmap(positions: torch.Tensor, numel: int) -> torch.Tensor:
    here = torch.zeros(numel, dtype=torch.uint8, device=positions.device)
    here[positions] = 1
    return pack(here, 1)


def _from_bitmap(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    return unpack(encoded, 1)[:numel].nonzero().view(-1)


def _deflated(positions: torch.Tensor, numel: int) -> torch.Tensor:
    """The number of planes, a byte; of each a byte, 1 if what follows is deflated, and its bytes, low ones first."""
    gaps = np.diff(positions.cpu().numpy(), prepend=-1) - 1
    planes = max(1, -(-int(gaps.max(initial=0)).bit_length() // 8))
    written = [bytes([planes])]
    for plane in range(planes):
        written.append(deflated((gaps >> 8 * plane & 255).astype(np.uint8)))
    return torch.from_numpy(np.frombuffer(b"".join(written), np.uint8).copy()).to(positions.device)


def _inflated(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    data = encoded.cpu().numpy().tobytes()
    planes, rest = (data[0], data[1:]) if data else (0, b"")
    most = max(1, -(-_width(numel) // 8))
    if not 1 <= planes <= most:
        raise GradlabError(f"positions: {planes} bytes each, expected 1 to {most}")
    gaps = np.zeros(count, np.int64)
    for plane in range(planes):
        low, rest = inflated(rest, count, "positions")
        gaps += np.frombuffer(low, np.uint8).astype(np.int64) << 8 * plane
    if rest:
        raise GradlabError(f"positions: {len(rest)} bytes more than there should be")
    positions = np.cumsum(gaps + 1) - 1
    return torch.from_numpy(positions).to(encoded.device)


_ENCODE = {"raw": _raw, "packed": _packed, "bitmap": _bitmap, "deflate": _deflated}
_DECODE = {"raw": _from_raw, "packed": _from_packed, "bitmap": _from_bitmap, "deflate": _inflated}
