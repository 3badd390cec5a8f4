"""Positions of a few elements out of many, as bytes: four codings, of which the smallest is to be had.

raw       4 bytes each (8 from 2^31 elements on)
packed    ceil(log2 numel) bits each
bitmap    one bit for each of the numel elements
deflate   the gaps between positions in ascending order, byte plane by byte plane, compressed by zlib; 8 bits each at
          a density of 1 %, where their entropy is 8.1 (clustered positions have less)
fixed     the smallest of the first three: its size follows from count and numel, so nobody has to be told
smallest  the smallest of all four, with a byte that says which; its size depends on the positions
"""

from __future__ import annotations

import functools
import zlib

import numpy as np
import torch

from gradlab.bits import pack, packed_bytes, unpack
from gradlab.errors import GradlabError

CODINGS = ("fixed", "smallest", "raw", "packed", "bitmap", "deflate")
_OF_KNOWN_SIZE = ("packed", "raw", "bitmap")
_ALL = (*_OF_KNOWN_SIZE, "deflate")


def varies(coding: str) -> bool:
    """Whether a coding's size depends on the positions."""
    return coding in ("deflate", "smallest")


def in_order(coding: str, count: int, numel: int) -> bool:
    """Whether positions have to be in ascending order, as they come back."""
    return _chosen(coding, count, numel) not in ("raw", "packed")


def index_bytes(coding: str, count: int, numel: int) -> int:
    """Bytes of `count` positions out of `numel`; where they vary, of positions drawn at random."""
    return _random_positions_bytes(coding, count, numel) if varies(coding) else _known_bytes(coding, count, numel)


def encode(positions: torch.Tensor, numel: int, coding: str) -> torch.Tensor:
    """Positions (count,), int64, below numel, as bytes, uint8. In ascending order, where `in_order` says so."""
    coding = _chosen(coding, len(positions), numel)
    if coding != "smallest":
        return _ENCODE[coding](positions, numel)
    known = min(_OF_KNOWN_SIZE, key=lambda one: _known_bytes(one, len(positions), numel))
    deflated = _deflated(positions, numel)
    if len(deflated) < _known_bytes(known, len(positions), numel):
        known, encoded = "deflate", deflated
    else:
        encoded = _ENCODE[known](positions, numel)
    return torch.cat([encoded.new_tensor([_ALL.index(known)]), encoded])


def decode(encoded: torch.Tensor, count: int, numel: int, coding: str) -> torch.Tensor:
    """The inverse of `encode`: (count,), int64.

    Raises:
        GradlabError: for bytes that `encode` does not write.
    """
    coding = _chosen(coding, count, numel)
    if coding == "smallest":
        if not len(encoded) or int(encoded[0]) >= len(_ALL):
            raise GradlabError(f"positions: coding {encoded[:1].tolist()}, expected one of 0 to {len(_ALL) - 1}")
        coding, encoded = _ALL[int(encoded[0])], encoded[1:]
    return _DECODE[coding](encoded, count, numel)


def _chosen(coding: str, count: int, numel: int) -> str:
    """What "fixed" stands for; others are themselves."""
    if coding != "fixed":
        return coding
    return min(_OF_KNOWN_SIZE, key=lambda one: _known_bytes(one, count, numel))


def _width(numel: int) -> int:
    """Bits of a position below numel."""
    return max(0, numel - 1).bit_length()


def _raw_dtype(numel: int) -> torch.dtype:
    return torch.int32 if numel <= 2**31 else torch.int64


def _known_bytes(coding: str, count: int, numel: int) -> int:
    sizes = {"raw": count * _raw_dtype(numel).itemsize, "packed": packed_bytes(count, _width(numel))}
    sizes["bitmap"] = packed_bytes(numel, 1)
    return min(sizes.values()) if coding == "fixed" else sizes[coding]


@functools.lru_cache(maxsize=4096)
def _random_positions_bytes(coding: str, count: int, numel: int) -> int:
    draws = np.random.default_rng(0)
    positions = np.sort(draws.choice(numel, count, replace=False, shuffle=False)) if count else np.zeros(0, np.int64)
    return len(encode(torch.from_numpy(positions), numel, coding))


# --- the codings ---------------------------------------------------------------------------------------------------


def _raw(positions: torch.Tensor, numel: int) -> torch.Tensor:
    return positions.to(_raw_dtype(numel)).view(torch.uint8)


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
    gaps = np.diff(positions.cpu().numpy(), prepend=-1) - 1
    planes = max(1, -(-int(gaps.max(initial=0)).bit_length() // 8))
    data = b"".join((gaps >> 8 * plane & 255).astype(np.uint8).tobytes() for plane in range(planes))
    written = np.frombuffer(bytes([planes]) + zlib.compress(data, 6), np.uint8)
    return torch.from_numpy(written.copy()).to(positions.device)


def _inflated(encoded: torch.Tensor, count: int, numel: int) -> torch.Tensor:
    data = encoded.cpu().numpy().tobytes()
    planes = data[0] if data else 0
    if not 1 <= planes <= 8:
        raise GradlabError(f"positions: {planes} bytes each, expected 1 to 8")
    inflater = zlib.decompressobj()
    try:
        found = inflater.decompress(data[1:], planes * count + 1)  # never more than there should be
    except zlib.error as error:
        raise GradlabError(f"positions: not what was compressed: {error}") from error
    if len(found) != planes * count:
        raise GradlabError(f"positions: {len(found)} bytes, expected {planes * count}")
    parts = np.frombuffer(found, np.uint8).reshape(planes, count).astype(np.int64)
    positions = np.cumsum(sum(part << 8 * plane for plane, part in enumerate(parts)) + 1) - 1
    if count and not 0 <= positions[-1] < numel:
        raise GradlabError(f"positions: up to {positions[-1]}, expected less than {numel}")
    return torch.from_numpy(positions).to(encoded.device)


_ENCODE = {"raw": _raw, "packed": _packed, "bitmap": _bitmap, "deflate": _deflated}
_DECODE = {"raw": _from_raw, "packed": _from_packed, "bitmap": _from_bitmap, "deflate": _inflated}
