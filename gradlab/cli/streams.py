"""Standard output and error as they may be: of any encoding, and read by somebody who stops in the middle."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE has ended
_NEAREST = "gradlab.nearest"  # name of the error handler
_INSTEAD = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", "__..--==", strict=True)),
        **dict(zip("─━│┃┌┐└┘├┤┬┴┼╭╮╰╯═║", "--||+++++++++++++=|", strict=True)),
        **dict(zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)),
        **dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)),
        **{"‖": "||", "ĝ": "g", "…": "...", "→": "->", "←": "<-", "≤": "<=", "≥": ">=", "≈": "~", "∞": "inf"},
        **{"°": " deg", "µ": "u", "λ": "lambda", "δ": "delta", "Σ": "sum", "·": "*", "\xa0": " "},
    }
)


def settle() -> None:
    """Let standard output and error write any text: what their encoding lacks is replaced (`encodable`)."""
    for stream in _streams():
        if hasattr(stream, "reconfigure"):
            with suppress(OSError):  # of a position that is asked for afterwards
                stream.reconfigure(errors=_NEAREST)


def encodable(text: str, encoding: str) -> str:
    r"""Replace what an encoding lacks: by something alike that it has, or by an escape, which keeps names apart.

    >>> from gradlab.cli.streams import encodable
    >>> encodable("µs → λ, tête", "ascii"), encodable("µs → λ, tête", "latin-1")
    ('us -> lambda, t\\xeate', 'µs -> lambda, tête')
    """
    return text.encode(encoding, _NEAREST).decode(encoding)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    instead = (one.translate(_INSTEAD) for one in lacking)
    shown = (one if one.isascii() else one.encode("unicode_escape").decode() for one in instead)
    return "".join(shown), error.end


codecs.register_error(_NEAREST, _replaced)


def flush() -> None:
    """Write what is buffered, while its failure can still be told. Raise OSError if that is impossible."""
    for stream in _streams():
        if not stream.closed:
            stream.flush()


def silence() -> None:
    """Send what is still buffered nowhere: nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)


def is_of_broken_pipe(error: BaseException | None) -> bool:
    """Return whether an exception came of writing to a pipe whose reader has ended."""
    while error is not None and not isinstance(error, BrokenPipeError):
        error = error.__context__
    return error is not None


def _streams() -> Iterator[TextIO]:
    # None where a process has been started without.
    yield from (stream for stream in (sys.stdout, sys.stderr) if stream is not None)
