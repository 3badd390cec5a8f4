"""Bytes through DEFLATE (RFC 1951), and back without ever more than there should be."""

from __future__ import annotations

import zlib
from typing import Any

from gradlab.errors import GradlabError


def _fastest() -> Any:
    """Return the module that inflates fastest: ISA-L's takes a third of zlib's time, where it is installed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib
    return isal_zlib


_FASTEST: Any = _fastest()
_MORE = bytes(8)  # an inflater looks ahead
MATCHES, CODES_ALONE = zlib.Z_DEFAULT_STRATEGY, zlib.Z_HUFFMAN_ONLY


def deflated(data: Any, strategy: int = MATCHES) -> bytes:
    """Return a byte, 1 for deflated data and else 0, and the data, deflated where that is shorter. `MATCHES` looks for
    repetitions; `CODES_ALONE`, for uint8, codes bytes by frequency in a fifth of the time."""
    if (
        strategy == CODES_ALONE and data.size and (data == data[0]).all()
    ):  # a code takes a bit, a repetition next to none
        strategy = MATCHES
    # With the most memory, 32 thousand codes share a table.
    level, memory = (6, zlib.DEF_MEM_LEVEL) if strategy == MATCHES else (1, 9)
    deflater = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS, memory, strategy)
    short = deflater.compress(data) + deflater.flush()
    return b"\1" + short if len(short) < len(data) else b"\0" + bytes(data)


def inflated(data: bytes, count: int, what: str) -> tuple[bytes, bytes]:
    """Decompress `count` bytes that `deflated` returned; return them and what follows. No more memory is taken than for
    `count` bytes; other data is refused."""
    if data[:1] not in (b"\0", b"\1"):
        raise GradlabError(f"{what}: begin with {data[:1]!r}, expected a byte 0 or 1")
    if data[:1] == b"\1":
        inflater = _FASTEST.decompressobj(-zlib.MAX_WBITS)
        try:
            found = inflater.decompress(data[1:], count + 1)
        except _FASTEST.error as wrong:
            raise GradlabError(f"{what}: not what was compressed: {wrong}") from wrong
        if len(found) == count and not inflater.eof:
            raise GradlabError(f"{what}: not whole")
        rest = inflater.unused_data
    else:
        found, rest = data[1 : 1 + count], data[1 + count :]
    if len(found) != count:
        raise GradlabError(f"{what}: {len(found)} bytes, expected {count}")
    return found, rest


def inflated_alone(data: bytes, count: int, what: str) -> bytes:
    """Decompress the first `count` bytes of deflated data that may go on or have no end; fewer are refused."""
    try:
        found = _FASTEST.decompressobj(-zlib.MAX_WBITS).decompress(data + _MORE, count) if count else b""
    except _FASTEST.error as wrong:
        raise GradlabError(f"{what}: not what was compressed: {wrong}") from wrong
    if len(found) != count:
        raise GradlabError(f"{what}: {len(found)} bytes, expected {count}")
    return bytes(found)
