"""One run of the user's command under one plan: started, watched by its losses, and ended with all its processes."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlab.errors import GradlabError
from gradlab.printable import printable
from gradlab.trial import VARIABLE, Losses, TrialSettings, read_losses

LOG = "output.log"
_LOOK_EVERY = 0.2  # seconds
_SHARE = 0.05  # of a core's time that looking takes at most
_GRACE = 5.0  # seconds in which a process may end after SIGTERM
_LEAVING = 15.0  # after its last step
_TAIL_BYTES = 2**18  # of the output, in which a reason is looked for
_RANK = re.compile(r"^\[rank\d+\]:\s?", re.MULTILINE)  # how torch begins the lines of a rank's traceback

_ERROR = re.compile(r"[\w.]*(?:Error|Exception|Interrupt|Exit)\b(?=:|$)")  # how a traceback ends
_SHOWN = 24  # lines of output that tell of a failure


@dataclass(frozen=True)
class Ended:
    """A run that is over: its ranks' losses and its seconds.

    problem: why it did not come to its end by itself, in a line; None: it did. output: lines that say more of that.
    stopped: whether `watch` ended it.
    """

    losses: Losses
    seconds: float
    problem: str | None = None
    output: str = ""
    stopped: bool = False


def run_trial(
    command: Sequence[str],
    folder: Path,
    settings: TrialSettings,
    watch: Callable[[Losses], bool] = lambda losses: False,
    until: float | None = None,
) -> Ended:
    """Run a command under a plan. Whatever happens, no process of the run is left.

    Args:
        command: its words.
        folder: a new folder for the plan, the losses and the output.
        settings: the plan and the number of steps.
        watch: receives the losses so far now and then, and returns whether that is enough.
        until: time on `time.monotonic` at which it is ended. None: never.

    Raises:
        GradlabError: if the command cannot be started, or the losses are not what ranks write.
    """
    folder.mkdir(parents=True)
    settings.save(folder)
    began = time.monotonic()
    with open(folder / LOG, "wb") as log:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        environment = {**os.environ, VARIABLE: str(folder)}
        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        except OSError as error:
            raise GradlabError(f"cannot run {command[0]}: {error.strerror or error}") from None
        try:
            late, stopped = _wait(process, folder, settings.steps, watch, until)
        finally:
            _end(process, folder)
    losses, seconds = read_losses(folder), time.monotonic() - began
    if late:
        return Ended(losses, seconds, f"not over after {seconds:.0f} s")
    if stopped or not process.returncode or losses.steps >= settings.steps:
        return Ended(losses, seconds, stopped=stopped)
    found, output = _error_in(_RANK.sub("", _tail(folder)))
    return Ended(losses, seconds, found or f"exit code {process.returncode}", output)


def _wait(
    process: subprocess.Popen[bytes], folder: Path, steps: int, watch: Callable[[Losses], bool], until: float | None
) -> tuple[bool, bool]:
    """Wait for the end of a process. Returns whether it is too late, and whether `watch` has seen enough."""
    complete, pause = math.inf, _LOOK_EVERY
    while process.poll() is None:
        time.sleep(pause)
        looked = time.monotonic()
        losses, now = read_losses(folder), time.monotonic()
        pause = max(_LOOK_EVERY, (now - looked) / _SHARE)
        if losses.steps >= steps:
            complete = min(complete, now)
            if now > complete + _LEAVING:
                break
        elif until is not None and now > until:
            return True, False
        elif watch(losses):
            return False, True
    return False, False


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End a process and all that it has started: torchrun's ranks have sessions of their own."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    for one in _left_over(folder):
        with suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _left_over(folder: Path) -> Iterator[int]:
    """Find processes of a run by its folder in their environment, where the system tells that (Linux)."""
    mark = f"{VARIABLE}={folder}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in place.read_bytes().split(b"\0"):
                yield int(place.parent.name)


def _error_in(output: str) -> tuple[str, str]:
    """Find the first error of a rank, which torchrun's own follow, and the lines around it; without one the last."""
    lines = output.splitlines()
    at = next((number for number, line in enumerate(lines) if _ERROR.match(line)), None)
    if at is None:
        return "", "\n".join(lines[-_SHOWN:])
    return lines[at][:300], "\n".join(lines[max(0, at - _SHOWN // 2) : at + _SHOWN // 2])


def _tail(folder: Path) -> str:
    with open(folder / LOG, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return printable(file.read().decode("utf-8", "replace"))
