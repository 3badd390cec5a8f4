"""Workers on torchft that tests start, kill and start again, and its lighthouse."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.warm_python import python

# The one place that says what tests with torchft need; without it they are skipped.
MISSING = "" if importlib.util.find_spec("torchft") else "needs gradlab[torchft]: make elastic"
JOB = Path(__file__).parents[1] / "jobs" / "elastic_job.py"
LIGHTHOUSE = (
    "import json, sys, time; from torchft.coordination import LighthouseServer; "
    "server = LighthouseServer(**json.loads(sys.argv[1])); time.sleep(1e6)"
)
PATIENCE = 90.0  # seconds


class Worker:
    """A process that trains, and what it has told: lines of JSON, each with the seconds at which they came."""

    def __init__(self, name: str, lighthouse: str, given: dict[str, Any]) -> None:
        self.name, self.told = name, list[dict[str, Any]]()
        self._process = subprocess.Popen(
            [python("torchft"), str(JOB), name, lighthouse, json.dumps(given)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "RUST_LOG": "off"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.told.append({**json.loads(line), "at": time.monotonic()})

    @property
    def steps(self) -> int:
        """Outer steps that it has told of."""
        return max((one["step"] for one in list(self.told) if "step" in one), default=-1)

    def all_of(self, what: str) -> list[Any]:
        """What it has told under a name, in order."""
        return [one[what] for one in list(self.told) if what in one]

    def at(self, what: str) -> list[float]:
        """Seconds at which it told something of a name."""
        return [one["at"] for one in list(self.told) if what in one]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process itself, which starts by telling its number."""
        wait_until(lambda: bool(self.all_of("pid")), f"{self.name} starts")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.all_of("pid")[0], number)

    def kill(self) -> None:
        """Kill it, as when its machine loses its power."""
        self.signal(signal.SIGKILL)
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)

    def wait(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait until it has ended; return the last that it told."""
        self._process.wait(seconds)
        self._reader.join(seconds)
        return self.told[-1]


class Lighthouse:
    """torchft's lighthouse, on a port that stays."""

    def __init__(self, least: int = 1, join_seconds: float = 5.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        numbers = {"min_replicas": least, "join_timeout_ms": int(1000 * join_seconds)}
        given = {"bind": f"[::]:{port}", "quorum_tick_ms": 20, "heartbeat_timeout_ms": 2000, **numbers}
        self.address = f"http://localhost:{port}"
        self._command = [python("torchft"), "-c", LIGHTHOUSE, json.dumps(given)]
        self.start()

    def start(self) -> None:
        """Start it, for the first time or anew."""
        quiet = os.environ | {"RUST_LOG": "off"}
        self._process = subprocess.Popen(self._command, env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        """End it; it keeps nothing."""
        self._process.terminate()
        self._process.wait(PATIENCE)


@contextlib.contextmanager
def run(
    given: dict[str, Any], workers: int, **lighthouse: Any
) -> Iterator[tuple[list[Worker], Callable[..., Worker], Lighthouse]]:
    """Workers w_0, w_1, ... of one run; a function that starts one more, by number; and their lighthouse."""
    light, started = Lighthouse(**lighthouse), list[Worker]()

    def start(number: int, **other: Any) -> Worker:
        started.append(Worker(f"w_{number}", light.address, given | other))
        return started[-1]

    try:
        yield [start(number) for number in range(workers)], start, light
    finally:
        for one in started:
            if one.all_of("pid"):
                one.kill()
        light.stop()


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait until something is so."""
    began = time.monotonic()
    while not is_so():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)
