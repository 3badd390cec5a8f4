"""Standard output and error as they may be: of any encoding, and read by somebody who stops in the middle."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

BROKEN_PIPE = 141  # as a shell reports a process that SIGPIPE has ended


def settle() -> None:
    """Let standard output and error write any text: what their encoding lacks is an escape, which keeps names apart."""
    for stream in (sys.stdout, sys.stderr):  # None where a process has been started without
        if hasattr(stream, "reconfigure"):
            with suppress(OSError):  # of a position that is requested afterwards
                stream.reconfigure(errors="backslashreplace")


def flush() -> None:
    """Write what is buffered, while its failure can still be reported. Raise OSError if that is impossible."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
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
