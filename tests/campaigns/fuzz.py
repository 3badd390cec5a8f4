"""The project's files under attack: damaged, altered and sealed again, claiming too much; nothing may fall.

    PYTHONPATH=tests python tests/campaigns/fuzz.py [--formats artifact npz ...] [--count 1000] [--seconds 600]
        [--seed N] [--only artifact:1234]

prints a table with a line per format and a line per finding; the exit code is 1 if there is one. Each case is one
number: the same number makes the same file again.

Every file is read by the project's own reader, and what it holds is used once. That must end in one of two ways: the
file is refused with a GradlabError of one line, or it is taken. Taken with other content than it had before is a
finding where its bytes alone were damaged. So is any other exception, the death of the process, more than 10 seconds,
and memory above 2 GiB, or above four times the file's size where that is more than 64 MiB. Files are read in processes
of their own, a batch in each; one that is lost costs the case at which it was.

What one rank of a run sends is a format, too: `messages` in lockstep, `network` between two processes of Gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.fuzzed import FORMATS, Case
from gradlab.errors import GradlabError

BATCH = 2000  # cases of a process
CASE_SECONDS = 10
MOST_BYTES, FEW_BYTES, TIMES = 2**31, 2**26, 4  # of memory: never more; not counted; files' sizes
REFUSED, TAKEN = "refused", "taken"


def outcome(case: Case, path: Path) -> str:
    """Read one file as the project does, and use what it holds: how that ended."""
    before = peak()
    signal.alarm(CASE_SECONDS)
    try:
        path.write_bytes(case.data)
        found = case.read(path)
        ended = TAKEN if case.altered or found == case.expected else "FOUND: taken with other content"
    except GradlabError as error:
        ended = REFUSED if "\n" not in str(error) else f"FOUND: an error of several lines: {str(error)[:200]!r}"
    except TimeoutError:
        ended = f"FOUND: more than {CASE_SECONDS} seconds"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ended = f"FOUND: {type(error).__name__}: {str(error)[:150]} ({Path(frame.filename).name}:{frame.lineno})"
    finally:
        signal.alarm(0)
    grown = peak() - before
    if grown > min(MOST_BYTES, max(FEW_BYTES, TIMES * len(case.data))):
        ended = f"FOUND: {grown / 2**20:.0f} MiB for a file of {len(case.data)} bytes"
    return ended


def peak() -> int:
    """The most memory this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(name: str, numbers: Sequence[int]) -> None:
    """Run a batch: a line of JSON before each case, and one after it."""

    def late(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    with tempfile.TemporaryDirectory() as folder, closing(FORMATS[name]()) as form:
        for number in numbers:
            print(json.dumps([number]), flush=True)
            case = form.case(np.random.default_rng([number]))
            print(json.dumps([number, case.kind, outcome(case, Path(folder) / form.file_name)]), flush=True)


def batches(name: str, first: int, count: int) -> Iterator[tuple[int, str, str]]:
    """Run so many cases of a format in processes: number, kind and how each ended."""
    number = first
    while number < first + count:
        last = min(first + count, number + BATCH)
        command = [sys.executable, __file__, "--work", name, str(number), str(last)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        yield from (tuple(line) for line in lines if len(line) == 3)  # type: ignore[misc]
        begun = lines[-1][0] if lines else number
        if done.returncode and (not lines or len(lines[-1]) == 1):
            said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            yield begun, "?", f"FOUND: the process ended with {done.returncode}: {said[:200]}"
        number = begun + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--count", type=int, default=1000, help="cases of each format")
    parser.add_argument("--seconds", type=float, default=600, help="after which no further batch of a format begins")
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--only", metavar="FORMAT:NUMBER", help="run one case here, with its traceback")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        name, first, last = options.work
        work(name, range(int(first), int(last)))
        return 0
    if options.only:
        return one(*options.only.split(":"))
    findings = 0
    print(f"{'format':12s} {'cases':>7s} {'refused':>8s} {'taken':>7s} {'found':>6s}  by kind of damage")
    for name in options.formats:
        began, ended, kinds, found = time.monotonic(), Counter[str](), Counter[str](), []
        for number, kind, how in batches(name, options.seed, options.count):
            kinds[kind] += 1
            ended[how if how in (REFUSED, TAKEN) else "found"] += 1
            if how not in (REFUSED, TAKEN):
                found.append(f"  {name}:{number} {kind}: {how.removeprefix('FOUND: ')}")
            if time.monotonic() - began > options.seconds:
                break
        told = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
        cases = sum(ended.values())
        print(f"{name:12s} {cases:7d} {ended[REFUSED]:8d} {ended[TAKEN]:7d} {ended['found']:6d}  {told}", flush=True)
        print("\n".join(found[:40]), end="\n" if found else "", flush=True)
        findings += len(found)
    print(f"{findings} findings")
    return 1 if findings else 0


def one(name: str, number: str) -> int:
    """Run one case in this process, and let what it raises be seen."""
    form = FORMATS[name]()
    case = form.case(np.random.default_rng([int(number)]))
    print(f"{case.kind}, {len(case.data)} bytes")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / form.file_name
        path.write_bytes(case.data)
        found = case.read(path)
    print("taken, " + ("the same" if found == case.expected else "altered"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
