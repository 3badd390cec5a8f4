"""The coder of whole numbers that are mostly zero: loses nothing, comes near the entropy, and believes no message."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st

from gradlab.coding.deflate import CODES_ALONE, deflated, inflated
from gradlab.coding.huffman import code_of
from gradlab.coding.level_tables import nothing_known
from gradlab.coding.levels import CODES, LARGEST, decode_levels, encode_levels, ones_and_all
from gradlab.errors import GradlabError
from support.laws import law


def drawn(seed: int, sizes: list[int], shares: list[float], spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Numbers other than zero of layers with these shares of them, and where they are."""
    draw = np.random.default_rng(seed)
    here = np.concatenate([draw.random(size) < share for size, share in zip(sizes, shares, strict=True)])
    positions = np.flatnonzero(here)
    magnitudes = np.minimum(LARGEST, 1 + np.floor(draw.exponential(spread, len(positions)) ** 2)).astype(np.int32)
    return positions, np.where(draw.random(len(positions)) < 0.5, -magnitudes, magnitudes).astype(np.int32)


@pytest.mark.parametrize("share", [0.01, 0.2, 0.45, 0.9])
def test_known_tables_save_the_bytes_of_tables(share: float) -> None:
    """Of layers whose shares differ; and what those of other layers do not fit brings its own."""
    sizes, shares = [30_000] * 8, [share * (0.3 + number / 10) for number in range(8)]
    positions, levels = drawn(1, sizes, shares, 0.7)
    own = len(encode_levels(positions, levels, sizes))
    before = [noted(*drawn(seed, sizes, shares, 0.7), sizes) for seed in range(2, 6)]
    fitting = [sum(of_layer) for of_layer in zip(*before, strict=True)]
    wrong = noted(*drawn(2, sizes, [0.99] * 8, 0.7), sizes)
    assert len(encode_levels(positions, levels, sizes, fitting)) < own
    assert len(encode_levels(positions, levels, sizes, wrong)) < 1.05 * own + 30 * len(sizes)


layers = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from([0.0, 0.001, 0.02, 0.3, 0.49, 0.51, 0.9, 1.0])),
    min_size=1,
    max_size=6,
)


def noted(positions: np.ndarray, levels: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """The frequencies of these numbers' codes, by layer, as whoever decodes them notes them."""
    nothing, seen = nothing_known(len(sizes)), nothing_known(len(sizes))
    decode_levels(encode_levels(positions, levels, sizes, nothing), sizes, nothing, seen)
    return seen


@law(layers, st.sampled_from([0.3, 1.0, 20.0, 3e4]), st.integers(0, 999), st.booleans())
def test_what_is_decoded_is_what_was_encoded(
    described: list[tuple[int, float]], spread: float, seed: int, known: bool
) -> None:
    """With tables in the message, and with those of other numbers, which fit or do not."""
    sizes, shares = [size for size, _ in described], [share for _, share in described]
    positions, levels = drawn(seed, sizes, shares, spread)
    before = noted(*drawn(seed + 1, sizes, shares[::-1], spread), sizes) if known else None
    seen = nothing_known(len(sizes))
    found, there = decode_levels(encode_levels(positions, levels, sizes, before), sizes, before, seen)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(there, levels)
    ends = np.searchsorted(positions, np.cumsum([0, *sizes]))
    for frequencies, first, last in zip(seen if known else [], ends, ends[1:], strict=False):
        assert ones_and_all(frequencies) == (np.count_nonzero(np.abs(levels[first:last]) == 1), last - first)


@pytest.mark.parametrize(("share", "spread"), [(0.02, 0.7), (0.3, 30.0), (0.6, 0.5), (0.9, 9.0)])
def test_blocks_of_codes_decode_by_themselves(share: float, spread: float) -> None:
    """Bit by bit, from where the message says that each begins, without what comes before: the symbols of a layer, as
    often as whoever decodes the whole notes them."""
    sizes = [12_001]
    positions, levels = drawn(3, sizes, [share], spread)
    known, seen = noted(*drawn(4, sizes, [share], spread), sizes), nothing_known(1)
    data = encode_levels(positions, levels, sizes, known)
    decode_levels(data, sizes, known, seen)
    (kind,) = np.flatnonzero(seen[0].sum(1))
    code, count = code_of(known[0][kind]), int(seen[0].sum())
    symbols = {
        (int(width), int(bits)): at for at, (width, bits) in enumerate(zip(code.widths, code.codes, strict=True))
    }
    blocks, at = -(-count // CODES), -(-(2 + 14 + 17) // 8)  # the table: two flags, a count, the second stream's bytes
    lengths = np.frombuffer(data, "<u2", blocks, at)
    stream = np.unpackbits(np.frombuffer(data, np.uint8)[at + 2 * blocks :], bitorder="little")
    found = np.zeros(256, np.int64)
    for start, length in zip(np.cumsum(lengths) - lengths, lengths, strict=True):
        width = bits = 0
        for bit in stream[start : start + length].tolist():
            bits |= bit << width
            width += 1
            if (width, bits) in symbols:
                found[symbols[width, bits]] += 1
                width = bits = 0
        assert width == 0
    np.testing.assert_array_equal(found, seen[0][kind])


def entropy(positions: np.ndarray, levels: np.ndarray, sizes: list[int]) -> float:
    """Bits of all numbers under a table of each layer's own frequencies."""
    whole = np.zeros(sum(sizes), np.int64)
    whole[positions] = levels
    bits = 0.0
    for layer in np.split(whole, np.cumsum(sizes)[:-1]):
        _, counts = np.unique(layer, return_counts=True)
        bits -= float((counts * np.log2(counts / len(layer))).sum())
    return bits


@pytest.mark.parametrize("spread", [0.3, 0.7, 1.5])
@pytest.mark.parametrize("share", [0.005, 0.02, 0.1, 0.3, 0.39, 0.45, 0.6, 0.9])
def test_bytes_are_within_a_twentieth_of_the_entropy(share: float, spread: float) -> None:
    """Independent numbers, layers with shares of their own, in several parts and blocks; and nothing is lost."""
    sizes = [400_000, 200_000, 300_000]
    positions, levels = drawn(1, sizes, [share, min(1.0, share * 1.5), share / 4], spread)
    data = encode_levels(positions, levels, sizes)
    assert 8 * len(data) < 1.05 * entropy(positions, levels, sizes)
    found, there = decode_levels(data, sizes)
    np.testing.assert_array_equal(found, positions)
    np.testing.assert_array_equal(there, levels)


@law(layers, st.integers(0, 999), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
@example([(14, 0.0), (196, 0.3)], 875, 462737, 21, True)
@example([(320, 0.3), (92, 0.49), (222, 0.02)], 146, 973501, 146, False)
def test_a_damaged_message_is_refused_or_stays_in_its_layers(
    described: list[tuple[int, float]], seed: int, place: int, value: int, told: bool
) -> None:
    """A byte is another one, or the end is missing: an error that says so, or numbers where numbers can be."""
    sizes, shares = [size for size, _ in described], [share for _, share in described]
    known = noted(*drawn(seed + 1, sizes, shares, 2.0), sizes) if told else None
    data = bytearray(encode_levels(*drawn(seed, sizes, shares, 2.0), sizes, known))
    damaged = bytearray(data)
    damaged[place % len(data)] = value
    for given in (bytes(damaged), bytes(data[: place % len(data)]), bytes(data) + b"\0"):
        try:
            positions, levels = decode_levels(given, sizes, known)
        except GradlabError:
            continue
        assert given != bytes(data) + b"\0"
        assert (np.diff(positions) > 0).all()
        assert not len(positions) or (positions[0] >= 0 and positions[-1] < sum(sizes))
        assert (np.abs(levels.astype(np.int64)) <= LARGEST).all()
        assert (levels != 0).all()


def test_a_small_message_takes_no_more_than_its_layer() -> None:
    """A megabyte of zeros, deflated to a kilobyte, is announced as ten bytes: eleven are inflated, and refused."""
    bomb = deflated(np.zeros(2**20, np.uint8))
    assert len(bomb) < 2000
    with pytest.raises(GradlabError, match="test: 11 bytes, expected 10"):
        inflated(bomb, 10, "test")
    assert inflated(bomb + b"rest", 2**20, "test") == (bytes(2**20), b"rest")
    with pytest.raises(GradlabError, match="test: not whole"):
        inflated(deflated(np.arange(200, dtype=np.uint8) // 30, CODES_ALONE)[:-1], 200, "test")


def test_more_numbers_than_a_layer_has_are_refused() -> None:
    """And as many as a layer of 10 million has, in few bytes."""
    with pytest.raises(GradlabError, match="levels: 15 numbers in part 0, expected at most 8"):
        decode_levels(b"\xfe" * 9, [8])
    with pytest.raises(GradlabError, match=r"levels: 400 bytes, expected \d+ or more"):
        decode_levels(b"\x00\x80" * 200, [10**7])


def test_a_position_beyond_its_layer_is_refused() -> None:
    """The last one of a layer of 20 elements, in one of 19, whose table of parts has as many bits."""
    data = encode_levels(np.array([19]), np.array([1], np.int32), [20])
    with pytest.raises(GradlabError, match="levels: a position beyond the end of its layer"):
        decode_levels(data, [19])


def test_codes_under_a_table_that_is_not_known_are_refused() -> None:
    sizes = [5000]
    positions, levels = drawn(1, sizes, [0.2], 0.7)
    data = encode_levels(positions, levels, sizes, noted(*drawn(2, sizes, [0.2], 0.7), sizes))
    with pytest.raises(GradlabError, match="levels: codes under a table that is not known"):
        decode_levels(data, sizes)


def test_threads_change_no_byte_and_hide_no_damage() -> None:
    sizes = [400_000, 200_000, 300_000]
    positions, levels = drawn(2, sizes, [0.3, 0.6, 0.01], 0.7)
    alone, threads = encode_levels(positions, levels, sizes), torch.get_num_threads()
    for count in (2, 5):
        torch.set_num_threads(count)
        try:
            assert encode_levels(positions, levels, sizes) == alone
            found, there = decode_levels(alone, sizes)
            with pytest.raises(GradlabError, match="levels"):
                decode_levels(alone[: len(alone) // 2], sizes)
        finally:
            torch.set_num_threads(threads)
        np.testing.assert_array_equal(found, positions)
        np.testing.assert_array_equal(there, levels)
