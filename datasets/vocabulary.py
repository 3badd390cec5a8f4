"""Turn words into token numbers, by a vocabulary of the most frequent words.

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


def build_vocabulary(text: str, limit: int) -> dict[str, int]:
    """Number the words of `text`: <unk> 0, <eos> 1, then words by falling count, at equal counts by code point.

    limit: tokens at most, <unk> and <eos> included.

    Raises:
        GradlabError: if the limit leaves room for no word.
    """
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


def encode(text: str, vocabulary: Mapping[str, int]) -> np.ndarray:
    """Encode a text as token numbers: one for each word and one for each end of line.

    Args:
        text: the text.
        vocabulary: token numbers by word.

    Returns:
        int64 (tokens,).
    """
    unknown, end = vocabulary[UNKNOWN], vocabulary[END_OF_LINE]
    tokens = array("q")
    for line in text.split("\n"):
        tokens.extend(vocabulary.get(word, unknown) for word in line.split())
        tokens.append(end)
    # The text after the last end of line has no end of line of its own.
    return np.frombuffer(tokens, np.int64)[:-1]
