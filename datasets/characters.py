"""Turn characters into token numbers, by the characters of the text."""

from __future__ import annotations

from collections import Counter

import numpy as np


def build_alphabet(text: str, limit: int) -> str:
    """List the characters of `text` by code point: a character's place is its token number.

    Args:
        text: the text.
        limit: tokens at most. Of a text with more characters the limit - 1 most frequent ones are kept, at equal counts
            by code point; all others are one token, the last.

    Returns:
        The characters that have a token of their own.
    """
    counts = Counter(text)
    if len(counts) <= limit:
        return "".join(sorted(counts))
    return "".join(sorted(sorted(counts, key=lambda character: (-counts[character], character))[: limit - 1]))


def encode_characters(text: str, alphabet: str) -> np.ndarray:
    """Encode a text as token numbers, one for each character.

    Args:
        text: the text.
        alphabet: characters in the order of their numbers, from `build_alphabet`.

    Returns:
        int64 (characters,). Characters that the alphabet lacks are len(alphabet).
    """
    known = np.array([ord(character) for character in alphabet], np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    places = np.searchsorted(known, points)
    found = known[np.minimum(places, len(known) - 1)] == points
    return np.where(found, places, len(known)).astype(np.int64)
