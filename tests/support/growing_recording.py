"""A real process that records, as far as a test lets it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.warm_python import python

_JOB = Path(__file__).parents[1] / "jobs" / "recording_in_blocks.py"


class Recording:
    """The process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def block(self) -> int:
        """Let it record 16 more steps; the steps that it has committed then."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill(self) -> None:
        """Kill it, and wait until it is gone: a warm Python works in another process, which has output and locks."""
        self.process.kill()
        self.process.communicate(timeout=60)

    def end(self) -> None:
        """Let it close the trace."""
        self.process.communicate(timeout=60)
        assert self.process.returncode == 0


@contextmanager
def recording(folder: Path) -> Iterator[Recording]:
    """Start one on a new folder. It is killed at the end unless it has ended."""
    command = [python(), str(_JOB), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Recording(process)
        finally:
            process.kill()
