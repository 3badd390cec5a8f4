"""CRC-32, as zlib defines it (RFC 1952), by the fastest library that is installed.

Recording and reading compute it of every value: with zlib that is a third of what writing costs. ISA-L multiplies
without carries and is six times as fast, where there are wheels of it.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
