"""Faults of one line, one at a time, in a copy of the sources: does a test notice?

    PYTHONPATH=tests python tests/campaigns/mutants.py [--jobs 2] [--only TEXT] [--allowed 0] [--timeout 300] [--list]

The faults stand in `mutant_records.py`, each with the test files that concern it. First these run without any fault.
Then, for each fault, a copy of the sources gets it, its tests run until one fails, and the copy is restored. One line
per fault: killed or survived, seconds, and the test that killed it. The exit code is 1 if the tests fail without a
fault, if a fault's text does not occur exactly once in its file, or if more than `--allowed` faults survive.

The libraries are imported once, and each run of tests is forked from there: most of them would take longer to start.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from campaigns.mutant_records import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
_FAILED = re.compile(r"^(?:FAILED|ERROR) (?:\S*/)?(\w+\.py\S*)", re.MULTILINE)
_PASSED, _TESTS_FAILED, _COLLECTION_FAILED, _INTERNAL, _EMPTY = 0, 1, 2, 3, 5  # exit codes of pytest
_NONE_SELECTED = "none of its tests is selected"
_LIBRARIES = (
    *("torch.nn.parallel", "scipy.optimize", "scipy.stats", "sklearn.feature_selection", "h5py", "joblib"),
    *("safetensors.torch", "matplotlib.figure", "jinja2", "typer", "rich.table"),
)
Run = tuple[Mutant | None, Sequence[str], str]  # a fault or none, test files, what pytest selects of them
# A fault and what it replaces may have one length and come within one second, where bytecode would seem to be right.
_MOMENTS = count(10**9)


@dataclass(frozen=True)
class Outcome:
    """killed: whether a test noticed; by: which; seconds: of the run; problem: why there is no answer, or nothing."""

    killed: bool
    by: str
    seconds: float
    problem: str = ""


def problem_of(mutant: Mutant) -> str:
    """Why a record is no fault of these sources; nothing if it is one."""
    path = ROOT / mutant.file
    if not path.is_file():
        return f"{mutant.file}: no such file"
    count = path.read_text(encoding="utf-8").count(mutant.old)
    if count != 1:
        return f"{mutant.file}: the text of this fault occurs {count} times, expected once: {mutant.old!r}"
    if mutant.old == mutant.new:
        return f"{mutant.file}: this fault changes nothing: {mutant.old!r}"
    missing = [name for name in mutant.tests if not (ROOT / name).is_file()]
    return f"{mutant.file}: its tests are not there: {', '.join(missing)}" if missing else ""


def packages() -> dict[str, str]:
    """The repository's folder of each package that has one of its own, as pyproject.toml maps them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return dict(re.findall(r'^"gradlab\.(\w+)" = "(\w+)"$', text, re.MULTILINE))


def copied_sources(site: Path) -> Callable[[str], Path]:
    """Copy the sources as they install; where in the copy a file of the repository is."""
    shutil.copytree(ROOT / "gradlab", site / "gradlab", ignore=shutil.ignore_patterns("__pycache__"))
    folders = packages()
    for package, folder in folders.items():
        target = site / "gradlab" / package
        shutil.copytree(ROOT / folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    by_folder = {folder: package for package, folder in folders.items()}

    def place(file: str) -> Path:
        top, _, rest = file.partition("/")
        return site / "gradlab" / (f"{by_folder[top]}/{rest}" if top in by_folder else rest)

    return place


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    moment = next(_MOMENTS)
    os.utime(path, (moment, moment))


class _Copy:
    """A copy of the sources, and the tests that run on it in a process of their own."""

    def __init__(self, site: Path) -> None:
        self.site, self.log = site, site / "log"
        self._place = copied_sources(site)
        self._restored: tuple[Path, str] | None = None
        self._began, self._pid = 0.0, 0
        self.number = -1  # of the run

    def start(self, number: int, run: Run) -> None:
        """Apply the run's fault, if it has one, and fork a process that runs its tests until one fails."""
        mutant, tests, select = run
        if mutant is not None:
            path = self._place(mutant.file)
            text = path.read_text(encoding="utf-8")
            self._restored = path, text
            _write(path, text.replace(mutant.old, mutant.new))
        words = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
        words += ["--rootdir", str(ROOT), *(["-k", select] if select else []), *(str(ROOT / name) for name in tests)]
        self.number, self._began = number, time.perf_counter()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._run_tests(words)

    def _run_tests(self, words: Sequence[str]) -> None:
        """In the new process, which ends here."""
        code = _INTERNAL
        try:
            os.setsid()
            os.chdir(self.site)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream in (1, 2):
                os.dup2(log, stream)
            os.environ |= {"PYTHONPATH": str(self.site), "COLUMNS": "250"}
            sys.path.insert(0, str(self.site))
            code = int(pytest.main(list(words)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def outcome(self, timeout: float) -> Outcome | None:
        """Of the run that was started; None while it runs."""
        ended, status = os.waitpid(self._pid, os.WNOHANG)
        seconds = time.perf_counter() - self._began
        if not ended and seconds < timeout:
            return None
        self.end_group()
        if self._restored is not None:
            _write(*self._restored)
            self._restored = None
        if not ended:
            os.waitpid(self._pid, 0)
            return Outcome(True, f"the limit of {timeout:.0f} seconds", seconds)
        return _read_outcome(os.waitstatus_to_exitcode(status), self.log.read_text(encoding="utf-8"), seconds)

    def end_group(self) -> None:
        """End the run's process, if it is still there, and the ranks that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def _read_outcome(code: int, output: str, seconds: float) -> Outcome:
    match = _FAILED.search(output)
    if code == _PASSED:
        return Outcome(False, "", seconds)
    if code == _EMPTY:
        return Outcome(False, "", seconds, _NONE_SELECTED)
    if code in (_TESTS_FAILED, _COLLECTION_FAILED) and match:
        return Outcome(True, match[1], seconds)
    return Outcome(False, "", seconds, f"pytest ended with {code}: {' '.join(output.split())[-200:]}")


class Campaign:
    """Runs tests on copies of the sources, as many at a time as there are copies."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._copies = [_Copy(folder / str(job)) for job in range(jobs)]

    def outcomes(self, runs: Sequence[Run], timeout: float) -> Iterator[Outcome]:
        """Of each run, in their order. timeout: of each, in seconds."""
        free, busy = list(self._copies), list[_Copy]()
        done: dict[int, Outcome] = {}
        waiting = list(enumerate(runs))
        try:
            for number in range(len(runs)):
                while number not in done:
                    while free and waiting:
                        busy.append(free.pop())
                        busy[-1].start(*waiting.pop(0))
                    time.sleep(0.05)
                    for copy in list(busy):
                        if (outcome := copy.outcome(timeout)) is not None:
                            done[copy.number] = outcome
                            busy.remove(copy)
                            free.append(copy)
                yield done.pop(number)
        finally:
            for copy in busy:
                copy.end_group()


def baseline(campaign: Campaign, mutants: Sequence[Mutant], timeout: float) -> list[str]:
    """Run the tests without any fault, each file once; a line for each run that is wrong."""
    selected: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        for name in mutant.tests:
            selected.setdefault(name, {})[mutant.select] = None
    files: dict[str, list[str]] = {}
    for name, selections in selected.items():
        files.setdefault("" if "" in selections else " or ".join(f"({one})" for one in selections), []).append(name)
    runs: list[Run] = [(None, tests, select) for select, tests in files.items()]
    outcomes = zip(runs, campaign.outcomes(runs, timeout), strict=True)
    return [
        f"{' '.join(tests)}: {one.problem or f'without any fault, {one.by}'}"
        for (_, tests, _), one in outcomes
        if one.killed or one.problem not in ("", _NONE_SELECTED)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="test runs at a time")
    parser.add_argument("--only", default="", help="faults with this text in their file, tests or sentence")
    parser.add_argument("--allowed", type=int, default=0, help="faults that may survive")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds of a run; one that takes longer is killed"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    words = parser.parse_args()
    mutants = [one for one in MUTANTS if words.only in " ".join((one.file, one.what, *one.tests))]
    if not mutants:
        print(f"no fault has {words.only!r} in its file, tests or sentence")
        return 1
    if problems := [problem for one in mutants if (problem := problem_of(one))]:
        print("\n".join(problems))
        return 1
    if words.list:
        print("\n".join(f"{one.file:<40} {one.what}" for one in mutants))
        return 0
    began = time.perf_counter()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no thread may run when a process is forked
    for library in _LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        campaign = Campaign(Path(folder), words.jobs)
        if wrong := baseline(campaign, mutants, 10 * words.timeout):
            print("\n".join(wrong))
            return 1
        print(f"{len(mutants)} faults; their tests pass without any ({time.perf_counter() - began:.0f} s)", flush=True)
        survived, unknown = _campaign(campaign, mutants, words.timeout)
    print(
        f"{len(mutants) - survived - unknown} of {len(mutants)} killed, {survived} survived, {unknown} without an "
        f"answer, {time.perf_counter() - began:.0f} s"
    )
    return int(survived > words.allowed or unknown > 0)


def _campaign(campaign: Campaign, mutants: Sequence[Mutant], timeout: float) -> tuple[int, int]:
    """Print a line per fault; how many survived, and of how many nothing is known."""
    survived = unknown = 0
    runs: list[Run] = [(one, one.tests, one.select) for one in mutants]
    for mutant, outcome in zip(mutants, campaign.outcomes(runs, timeout), strict=True):
        survived += not outcome.killed and not outcome.problem
        unknown += bool(outcome.problem)
        verdict = "NO ANSWER" if outcome.problem else "killed" if outcome.killed else "SURVIVED"
        print(f"{verdict:<9} {outcome.seconds:5.0f} s  {mutant.file:<40} {mutant.what}", flush=True)
        if outcome.problem or outcome.by:
            print(f"{'':21}by {outcome.by}" if outcome.by else f"{'':21}{outcome.problem}", flush=True)
    return survived, unknown


if __name__ == "__main__":
    sys.exit(main())
