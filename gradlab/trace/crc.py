"""CRC-32, as zlib defines it (RFC 1952), by the fastest library that is installed.

Recording and reading compute it of every value: with zlib that is a third of what writing costs. ISA-L, which
`pip install gradlab[isal]` brings, multiplies without carries and is six times as fast.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
