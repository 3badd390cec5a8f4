"""The start of the command `gradlab`: an interrupt is one line from the first import on."""

from __future__ import annotations

import signal
import sys
from typing import Any

INTERRUPTED = 130  # as a shell tells of a process that SIGINT has ended
_AGAIN = 0.005  # seconds after which an interrupt that came in an import is looked at again


def main() -> None:
    """Entry point of the console script."""
    interrupts = []

    def interrupt(number: int, frame: Any) -> None:
        interrupts.append(number)
        if _is_importing(frame):  # extensions that are interrupted there may abort the process
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        else:
            raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGALRM, interrupt)
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
    finally:
        # An alarm that comes while Python ends would end it.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _is_importing(frame: Any) -> bool:
    """Whether a frame, or one that has called it, is Python's own import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
