"""Codes of bytes under tables that both sides know, against zlib and the entropy, and bits in a row."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.coding.fields import packed_fields, read_fields
from gradlab.coding.huffman import code_of
from gradlab.errors import GradlabError
from support.laws import law

HUGE = np.array([2**40 >> min(40, number) for number in range(256)])  # codes would be 41 bits long


def drawn(seed: int, count: int, spread: float) -> np.ndarray:
    return np.minimum(255, np.random.default_rng(seed).exponential(spread, count)).astype(np.uint8)


def frequencies(symbols: np.ndarray) -> np.ndarray:
    return np.bincount(symbols, minlength=256)


def coded(symbols: np.ndarray, known: np.ndarray) -> bytes:
    code = code_of(known)
    return packed_fields(code.codes[symbols], code.widths[symbols], np.array([0, len(symbols)]))[0]


@law(st.integers(0, 3000), st.floats(0.1, 200), st.floats(0.1, 200), st.integers(0, 999), st.binary(max_size=9))
def test_what_is_decoded_is_what_was_encoded(count: int, spread: float, other: float, seed: int, more: bytes) -> None:
    """Under any frequencies, those of nothing and of one byte alone among them; and whatever follows."""
    symbols = drawn(seed, count, spread)
    for known in (frequencies(drawn(seed + 1, 5000, other)), np.zeros(256, np.int64), HUGE, np.eye(256, dtype=int)[7]):
        data, code = coded(symbols, known), code_of(known)
        assert len(data) == -(-int(frequencies(symbols) @ code.widths) // 8)
        np.testing.assert_array_equal(code.decoded(data + more, count, "test"), symbols)


@pytest.mark.parametrize("spread", [0.3, 3.0, 60.0])
def test_an_inflater_reads_it_and_it_is_near_the_entropy(spread: float) -> None:
    """Within 2 % of the entropy and 3 bytes, or of one bit a byte, which is the least that a code has."""
    symbols, known = drawn(0, 50_000, spread), frequencies(drawn(1, 10**6, spread))
    data, counts = coded(symbols, known), frequencies(symbols)
    assert code_of(known).fits(counts)
    found = zlib.decompressobj(-15).decompress(code_of(known).head + data, len(symbols))
    assert found == symbols.tobytes()
    shares = counts[counts > 0] / len(symbols)
    least = max(1.0, -float((shares * np.log2(shares)).sum())) * len(symbols) / 8
    if spread < 1:
        least *= 1.2  # few bytes, and each a whole number of bits
    assert len(data) <= 1.02 * least + 3
    assert spread < 1 or len(data) < len(zlib.compress(symbols.tobytes(), 9))


def test_a_table_that_does_not_fit_is_told_from_one_that_does() -> None:
    """And bytes that are all alike take next to none with a table of their own."""
    counts = frequencies(drawn(0, 20_000, 2.0))
    assert not code_of(HUGE[::-1].copy()).fits(counts)
    assert code_of(counts).fits(counts)
    alike = np.where(np.arange(256) == 9, 2000, 0)
    assert not code_of(alike).fits(alike)


def test_damage_is_refused_and_takes_no_memory() -> None:
    symbols, known = drawn(0, 100_000, 3.0), frequencies(drawn(1, 1000, 3.0))
    data, code = coded(symbols, known), code_of(known)
    assert len(code.decoded(data, 10, "test")) == 10
    with pytest.raises(GradlabError, match="test: "):
        code.decoded(data[:-30], len(symbols), "test")
    end = next(  # a code that no byte has ends what is read
        bits
        for bits in range(2**15)
        if not any(
            bits & (1 << width) - 1 == of for width, of in zip(code.widths.tolist(), code.codes.tolist(), strict=True)
        )
    )
    with pytest.raises(GradlabError, match="test: 0 bytes, expected 5"):
        code.decoded(end.to_bytes(2, "little"), 5, "test")


@law(st.lists(st.lists(st.integers(0, 63), max_size=9), min_size=1, max_size=5), st.integers(0, 999))
def test_fields_are_bits_in_a_row(groups: list[list[int]], seed: int) -> None:
    """Against whole numbers of Python; each group begins with a byte."""
    draw = np.random.default_rng(seed)
    widths = np.array([width for group in groups for width in group], np.uint8)
    fields = np.array([int(draw.integers(0, 2**width, dtype=np.uint64)) for width in widths.tolist()], np.uint64)
    ends = np.cumsum([0, *map(len, groups)])
    data, cuts = packed_fields(fields, widths, ends)
    expected, starts = b"", []
    for group, first in zip(groups, ends.tolist(), strict=False):
        number = bits = 0
        for field, width in zip(fields[first:].tolist(), group, strict=False):
            starts.append(8 * len(expected) + bits)
            number |= field << bits
            bits += width
        expected += number.to_bytes(-(-bits // 8), "little")
    assert data == expected
    assert cuts[-1] == len(data)
    found = read_fields(np.frombuffer(data, np.uint8), np.array(starts, np.int64), widths)
    np.testing.assert_array_equal(found, fields)
