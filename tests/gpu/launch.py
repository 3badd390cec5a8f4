"""Which checks there are and where each runs; start the processes of a job, and collect what they found.

A check that fails may leave a process, or the GPU's context in it, of no more use: the next check starts in new ones.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import engine_checks
import exchange_checks
import speed_checks
from outcome import FAILED, NOT_RUN, Check, Outcome, worst

RANK = Path(__file__).with_name("rank.py")
MODULES: dict[str, Mapping[str, Check]] = {
    module.__name__: module.CHECKS for module in (exchange_checks, engine_checks, speed_checks)
}
# After one rank has failed the others wait in vain; they get as long as their error messages take.
_GRACE_SECONDS = 15.0
# A check that has begun is ended this long after the last moment at which one may begin.
_LAST_CHECK_SECONDS = 30.0


@dataclass(frozen=True)
class Job:
    """The checks of a module on some ranks.

    backend: "" for one process without a process group; devices: by rank; module: of the checks, checks: their names;
    unavailable: why it cannot run here, or "".
    """

    title: str
    module: str
    checks: tuple[str, ...]
    devices: tuple[str, ...]
    backend: str = ""
    unavailable: str = ""


Row = tuple[str, str, Outcome]  # the job's title, the check, and what it found


def run(job: Job, deadline: float, numel: int, announce: Callable[[str], None]) -> Iterator[Row]:
    """Every check of a job, in order. deadline: by time.time(), when no check may begin any more."""
    if job.unavailable:
        yield from ((job.title, check, Outcome(NOT_RUN, job.unavailable)) for check in job.checks)
        return
    left = job.checks
    while left:
        if time.time() >= deadline:
            yield from ((job.title, check, Outcome(NOT_RUN, "the time was up")) for check in left)
            return
        announce(f"{job.title}: {len(left)} checks")
        outcomes = _attempt(replace(job, checks=left), deadline, numel)
        yield from ((job.title, check, outcome) for check, outcome in outcomes.items())
        left = left[len(outcomes) :]


def _attempt(job: Job, deadline: float, numel: int) -> dict[str, Outcome]:
    """Outcomes of the checks up to the one after which a process was lost, or the last; at least one."""
    with tempfile.TemporaryDirectory(prefix="gradlab-gpu-") as folder:
        processes = [_start(job, rank, Path(folder), deadline, numel) for rank in range(len(job.devices))]
        try:
            _wait(processes, deadline + _LAST_CHECK_SECONDS)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        ranks = [_Rank(Path(folder), rank, code) for rank, code in enumerate(codes)]
    outcomes: dict[str, Outcome] = {}
    for check in job.checks:
        if outcomes and not any(check in rank.begun for rank in ranks):
            break
        outcomes[check] = _joint(check, ranks, deadline)
    return outcomes


class _Rank:
    """What a process left behind: the checks it began, what those that ended found and when, and how it ended."""

    def __init__(self, folder: Path, number: int, code: int | None) -> None:
        self.number, self.code = number, code
        self.log = [
            line for line in (folder / f"{number}.log").read_text(errors="replace").splitlines() if line.strip()
        ]
        path = folder / f"{number}.jsonl"
        lines: list[dict[str, Any]] = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        self.begun = {line["check"] for line in lines}
        self.ended = {line["check"]: (line["time"], Outcome(**line["outcome"])) for line in lines if "outcome" in line}


def _joint(check: str, ranks: Sequence[_Rank], deadline: float) -> Outcome:
    """One outcome from those of all ranks. Where some failed, the first of them: others fail as they miss it."""
    for rank in ranks:
        if check not in rank.ended and rank.code is not None:
            last = rank.log[-1] if rank.log else "it said nothing"
            return Outcome(FAILED, f"rank {rank.number} ended with exit code {rank.code}: {last}")
    ended = sorted((rank.ended[check] for rank in ranks if check in rank.ended), key=lambda pair: pair[0])
    outcomes = [outcome for _, outcome in ended]
    if len(outcomes) < len(ranks) and not any(outcome.status == FAILED for outcome in outcomes):
        if time.time() >= deadline:
            return Outcome(NOT_RUN, "the time was up before it ended")
        return Outcome(FAILED, "a rank was stuck")
    return worst(outcomes)


def _start(job: Job, rank: int, folder: Path, deadline: float, numel: int) -> subprocess.Popen[bytes]:
    task = {
        "rank": rank,
        "folder": str(folder),
        "deadline": deadline,
        "numel": numel,
        **{key: value for key, value in asdict(job).items() if key not in ("title", "unavailable")},
    }
    environment = {**_FIXED, **os.environ}
    with open(folder / f"{rank}.log", "wb") as log:
        command = [sys.executable, str(RANK), json.dumps(task)]
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def _wait(processes: Sequence[subprocess.Popen[bytes]], until: float) -> None:
    """Until all have ended, or one has failed and the others had time to say what they saw."""
    while time.time() < until:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes):
            return
        if any(codes):
            until = min(until, time.time() + _GRACE_SECONDS)
        time.sleep(0.1)


# One machine: its own loopback, where host names may lead nowhere; cuBLAS's results must not depend on the stream.
_FIXED = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
if Path("/sys/class/net/lo").exists():
    _FIXED["GLOO_SOCKET_IFNAME"] = "lo"
