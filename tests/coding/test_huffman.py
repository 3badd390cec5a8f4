"""Codes of bytes under tables that both sides know, against zlib and the entropy."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import strategies as st

from gradlab.coding.huffman import coded, uncoded
from gradlab.errors import GradlabError
from support.laws import law

HUGE = np.array([2**40 >> min(40, number) for number in range(256)])  # codes would be 41 bits long


def drawn(seed: int, count: int, spread: float) -> np.ndarray:
    return np.minimum(255, np.random.default_rng(seed).exponential(spread, count)).astype(np.uint8)


def frequencies(symbols: np.ndarray) -> np.ndarray:
    return np.bincount(symbols, minlength=256)


@law(st.integers(0, 3000), st.floats(0.1, 200), st.floats(0.1, 200), st.integers(0, 999), st.binary(max_size=9))
def test_what_is_decoded_is_what_was_encoded(count: int, spread: float, other: float, seed: int, more: bytes) -> None:
    """Under any frequencies, those of nothing and of one byte alone among them; and what follows stays."""
    symbols = drawn(seed, count, spread)
    for known in (frequencies(drawn(seed + 1, 5000, other)), np.zeros(256, np.int64), HUGE, np.eye(256, dtype=int)[7]):
        data = coded(symbols, known)
        assert uncoded(data + more, count, known, "test") == (symbols.tobytes(), more)
        assert len(data) <= count + 1 or data[:1] == b"\2"


@pytest.mark.parametrize("spread", [0.3, 3.0, 60.0])
def test_an_inflater_reads_it_and_it_is_near_the_entropy(spread: float) -> None:
    """Within 2 % of the entropy and 3 bytes, or of one bit a byte, which is the least that a code has."""
    symbols, known = drawn(0, 50_000, spread), frequencies(drawn(1, 10**6, spread))
    data = coded(symbols, known)
    assert data[:1] == b"\2"
    counts = frequencies(symbols)
    shares = counts[counts > 0] / len(symbols)
    least = max(1.0, -float((shares * np.log2(shares)).sum())) * len(symbols) / 8
    if spread < 1:
        least *= 1.2  # few bytes, and each a whole number of bits
    assert len(data) <= 1.02 * least + 3
    assert spread < 1 or len(data) < len(zlib.compress(symbols.tobytes(), 9))


def test_bytes_that_a_table_does_not_fit_bring_their_own() -> None:
    symbols = drawn(0, 20_000, 2.0)
    data = coded(symbols, HUGE[::-1].copy())
    assert data[:1] == b"\1"
    assert uncoded(data, len(symbols), HUGE, "test")[0] == symbols.tobytes()


def test_damage_is_refused_and_takes_no_memory() -> None:
    symbols, known = np.zeros(100_000, np.uint8), frequencies(np.zeros(1000, np.uint8))
    symbols[-1] = 1  # what is all alike has another form
    data = coded(symbols, known)
    assert data[:1] == b"\2"
    with pytest.raises(GradlabError, match="test: 11 bytes, expected 10"):
        uncoded(data, 10, known, "test")
    with pytest.raises(GradlabError, match="test: "):
        uncoded(data[:-3], len(symbols), known, "test")
    with pytest.raises(GradlabError, match="test: "):
        uncoded(data, len(symbols) + 1, known, "test")
