"""Read text for language models from one file, or a folder with train.txt and test.txt, and cut it into samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from gradlab.errors import GradlabError

MAX_TEXT_BYTES = 1 << 27  # in one file; a token takes eight bytes in memory
EXPECTED = "a text file, or a folder with train.txt and test.txt"
_WHITE_SPACE = re.compile(rb"[ \t\r\n]")


class Text(NamedTuple):
    """The bytes of one split, and their source, for messages."""

    content: bytes
    source: str


def read_texts(path: str, *, between_words: bool = False, between_characters: bool = False) -> tuple[Text, Text]:
    """Read the training and the test text. In a single file these are the first 90 % of its bytes and the rest.

    A folder's valid.txt is not read, because nothing is tuned on it here.

    Args:
        path: a file, or a folder with train.txt and test.txt.
        between_words: move the cut of a single file to the next white space.
        between_characters: move the cut of a single file to the next beginning of a UTF-8 character.

    Returns:
        The training text and the test text.

    Raises:
        GradlabError: if the path is missing, cannot be read, or holds an empty or an oversized file.
    """
    place = Path(path)
    try:
        if place.is_dir():
            return _read(place / "train.txt"), _read(place / "test.txt")
        whole = _read(place)
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    cut = _cut(whole.content, between_words, between_characters)
    return Text(whole.content[:cut], f"{path} (first 90 %)"), Text(whole.content[cut:], f"{path} (last 10 %)")


def _read(file: Path) -> Text:
    if not file.is_file():
        what = "not a regular file" if file.exists() else "no such file"
        raise GradlabError(f"{file}: {what}, expected {EXPECTED}")
    with file.open("rb") as stream:
        content = stream.read(MAX_TEXT_BYTES + 1)
    if len(content) > MAX_TEXT_BYTES:
        raise GradlabError(f"{file}: more than {MAX_TEXT_BYTES} bytes; give a part of it")
    if not content:
        raise GradlabError(f"{file}: is empty, expected text")
    return Text(content, str(file))


def _cut(content: bytes, between_words: bool, between_characters: bool) -> int:
    cut = 9 * len(content) // 10
    if between_characters:
        cut = next((place for place in range(cut, len(content)) if content[place] & 0xC0 != 0x80), len(content))
    if not between_words:
        return cut
    space = _WHITE_SPACE.search(content, cut)
    return space.start() if space else len(content)


def decoded(text: Text) -> str:
    """Decode a text's UTF-8 bytes.

    Raises:
        GradlabError: if the bytes are not UTF-8.
    """
    try:
        return text.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GradlabError(
            f"{text.source}: not UTF-8 at byte {error.start}: words and characters need it; text_bytes takes any bytes"
        ) from None


def windows(tokens: np.ndarray, context: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut tokens into rows, which do not overlap; the last incomplete row is left out.

    Args:
        tokens: integers (tokens,).
        context: tokens in a row.
        source: the text's name, for messages.
    Returns:
        The rows, and each token's successor: two int64 tensors (samples, context), views of one copy.
    Raises:
        GradlabError: if there is no whole row.
    """
    _require_a_row(tokens, context, source)
    samples = (len(tokens) - 1) // context
    line = torch.from_numpy(tokens[: samples * context + 1].astype(np.int64))
    return line[:-1].view(samples, context), line[1:].view(samples, context)


def every_window(tokens: np.ndarray, context: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut tokens into rows that begin at every place, so that neighbours share all tokens but one.

    Args:
        tokens: integers (tokens,).
        context: tokens in a row.
        source: the text's name, for messages.
    Returns:
        The rows, and each token's successor: two int64 tensors (tokens - context, context), views of one copy.
    Raises:
        GradlabError: if there is no whole row.
    """
    _require_a_row(tokens, context, source)
    line = torch.from_numpy(tokens.astype(np.int64))
    return line[:-1].unfold(0, context, 1), line[1:].unfold(0, context, 1)


def _require_a_row(tokens: np.ndarray, context: int, source: str) -> None:
    if len(tokens) <= context:
        raise GradlabError(
            f"{source}: {len(tokens)} tokens, expected at least {context + 1}: a context of {context} and its successor"
        )
