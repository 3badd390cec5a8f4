"""Read text for language models from one file, or a folder with train.txt and test.txt, and cut it into samples."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from gradlab.errors import GradlabError

MAX_TEXT_BYTES = 1 << 27  # in one file; a token takes eight bytes in memory
EXPECTED = "a text file, or a folder with train.txt and test.txt"
_WHITE_SPACE = re.compile(rb"[ \t\r\n]")
Cut = Literal["bytes", "characters", "words"]


class Text(NamedTuple):
    """The bytes of one split, and their source, for messages."""

    content: bytes
    source: str


def read_texts(path: str, cut: Cut = "bytes") -> tuple[Text, Text]:
    """Read the training and the test text: train.txt and test.txt, or the first 90 % of a file's bytes and the rest.

    A folder's valid.txt is not read, because nothing is tuned on it here. `cut` is the unit that the split leaves
    whole: "characters" of UTF-8, or "words" between white space.
    """
    place = Path(path)
    try:
        if place.is_dir():
            return _read(place / "train.txt"), _read(place / "test.txt")
        whole = _read(place).content
    except OSError as error:
        raise GradlabError(f"{path}: cannot be read ({error.strerror or error})") from error
    end = _end_of_training(whole, cut)
    return Text(whole[:end], f"{path} (first 90 %)"), Text(whole[end:], f"{path} (last 10 %)")


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


def _end_of_training(content: bytes, cut: Cut) -> int:
    end = 9 * len(content) // 10
    if cut == "characters":
        return next((place for place in range(end, len(content)) if content[place] & 0xC0 != 0x80), len(content))
    if cut == "words":
        space = _WHITE_SPACE.search(content, end)
        return space.start() if space else len(content)
    return end


def decoded(text: Text) -> str:
    """Decode a text's UTF-8 bytes."""
    try:
        return text.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GradlabError(
            f"{text.source}: not UTF-8 at byte {error.start}: words and characters need it; text_bytes takes any bytes"
        ) from None


def windows(tokens: np.ndarray, context: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut tokens (tokens,) into rows and each token's successor: two int64 (samples, context), views of one copy.

    Rows do not overlap, and the last incomplete row is left out.
    """
    line = _line(tokens, context, source)
    rows = line[: (len(line) - 1) // context * context + 1]
    return rows[:-1].view(-1, context), rows[1:].view(-1, context)


def every_window(tokens: np.ndarray, context: int, source: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut tokens into rows that begin at every place: as `windows`, but (tokens - context, context)."""
    line = _line(tokens, context, source)
    return line[:-1].unfold(0, context, 1), line[1:].unfold(0, context, 1)


def _line(tokens: np.ndarray, context: int, source: str) -> torch.Tensor:
    if len(tokens) <= context:
        raise GradlabError(
            f"{source}: {len(tokens)} tokens, expected at least {context + 1}: a context of {context} and its successor"
        )
    return torch.from_numpy(tokens.astype(np.int64))
