"""Where the command `gradlab` begins: an interrupt is one line from the first import on."""

from __future__ import annotations

import signal
import sys
from typing import Any

INTERRUPTED = 130  # as a shell tells of a process that SIGINT has ended


def main() -> None:
    """Entry point of the console script."""
    interrupts = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        from gradlab.cli.main import main as run

        run()
    except SystemExit:
        raise
    except BaseException:
        # An import that is interrupted may end in another error, as numpy's does.
        if not interrupts:
            raise
        print("gradlab: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
