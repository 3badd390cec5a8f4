"""Turn text into token numbers: one for each character of an alphabet, or for each word of a vocabulary.

White space separates words, and every end of line is the token <eos>. A vocabulary holds the most frequent words of the
training text and <unk> for all others (Mikolov et al., "Recurrent neural network based language model", 2010; in
WikiText's form: Merity et al., "Pointer Sentinel Mixture Models", 2016, section 4).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping

import numpy as np

from gradlab.errors import GradlabError

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
RESERVED = (UNKNOWN, END_OF_LINE)  # the tokens 0 and 1 of every vocabulary


def build_alphabet(text: str, limit: int) -> str:
    """List the characters of `text` by code point: a character's place is its token number.

    If the text has more than `limit` characters, the limit - 1 most frequent ones are kept, at equal counts by code
    point. All others are one token, the last.
    """
    counts = Counter(text)
    if len(counts) <= limit:
        return "".join(sorted(counts))
    return "".join(sorted(sorted(counts, key=lambda character: (-counts[character], character))[: limit - 1]))


def encode_characters(text: str, alphabet: str) -> np.ndarray:
    """Encode a text as int64 (characters,). Characters that the alphabet lacks are len(alphabet)."""
    known = np.array([ord(character) for character in alphabet], np.int64)
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.int64)
    places = np.searchsorted(known, points)
    found = known[np.minimum(places, len(known) - 1)] == points
    return np.where(found, places, len(known)).astype(np.int64)


def build_vocabulary(text: str, limit: int) -> dict[str, int]:
    """Number at most `limit` words: <unk> 0, <eos> 1, then by falling count, at equal counts by code point."""
    if limit <= len(RESERVED):
        raise GradlabError(
            f"vocabulary of {limit} tokens: expected at least {len(RESERVED) + 1}, as {RESERVED} are two"
        )
    counts: Counter[str] = Counter()
    for line in text.split("\n"):
        counts.update(line.split())
    for word in RESERVED:
        counts.pop(word, None)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate([*RESERVED, *ranked[: limit - len(RESERVED)]])}


def encode_words(text: str, vocabulary: Mapping[str, int]) -> np.ndarray:
    """Encode a text as int64 (tokens,): one for each word and one for each end of line."""
    unknown, end = vocabulary[UNKNOWN], vocabulary[END_OF_LINE]
    tokens = array("q")
    for line in text.split("\n"):
        tokens.extend(vocabulary.get(word, unknown) for word in line.split())
        tokens.append(end)
    # The text after the last end of line has no end of line of its own.
    return np.frombuffer(tokens, np.int64)[:-1]
