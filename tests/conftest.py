"""Fixtures that several test files share. Modules are imported where they are used: workers import what they test."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from support.command_line import Command
from support.process_pool import ProcessPool
from support.warm_python import LIBRARIES, python, share, started_python

# Ranks and scripts that tests start import `support` and `jobs`, as the tests do (pythonpath in pyproject.toml).
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
os.environ["TRITON_INTERPRET"] = "1"  # kernels run on a CPU; triton looks when it is imported
settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=20)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")  # --hypothesis-profile comes later, and wins


# The files that take longest are begun first, so that no core is left without work at the end.
LONGEST = (
    "fsdp",
    "contract",
    "recommendation",
    "doctor",
    "outer_step",
    "cuda",
    "cli",
    "speed",
    "runtime",
    "capture",
    "wrappers",
)


def pytest_configure(config: pytest.Config) -> None:
    """Start what workers and jobs are forked from, once for all workers; in a worker, do its share for the others."""
    if config.getoption("numprocesses", None):
        os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # workers hand each other what they rewrote
        share()
        config.option.tx = [f"{one}//python={python(*LIBRARIES)}" for one in config.option.tx]
    elif worker := getattr(config, "workerinput", None):
        sys.executable = started_python()
        multiprocessing.set_executable(sys.executable)
        _rewrite_share(config, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def _rewrite_share(config: pytest.Config, number: int, workers: int) -> None:
    """Rewrite the assertions of every `workers`-th test file from `number` on, for all workers to load."""
    # Workers import all files at once and in one order, so that none would find what another rewrote.
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::workers]:
        folder = rewrite.get_cache_dir(path)
        cached = folder / (path.name[:-3] + rewrite.PYC_TAIL)
        if rewrite._read_pyc(path, cached) is None:
            folder.mkdir(parents=True, exist_ok=True)
            of_source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, of_source, cached)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; within a file nothing moves."""
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: the collector need not look through its million objects


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many codec x case pairs of the contract ran, and which did not."""
    outcomes = ("passed", "failed", "error", "skipped", "xfailed")
    reports = {what: [r for r in terminalreporter.stats.get(what, []) if _of_contract(r)] for what in outcomes}
    ran = {report.nodeid for of_outcome in reports.values() for report in of_outcome}
    if not ran:
        return
    from support.contract import cases

    codecs = {case for case in cases() if any(case in node.partition("[")[2] for node in ran)}
    counts = ", ".join(f"{len(of_outcome)} {what}" for what, of_outcome in reports.items())
    terminalreporter.write_line(
        f"contract: {len(ran)} codec x case pairs of {len(codecs)} codecs and settings: {counts}"
    )
    for report in reports["skipped"]:
        terminalreporter.write_line(f"contract: skipped {report.nodeid}: {report.longrepr}")


def _of_contract(report: object) -> bool:
    """Whether a report is of one codec and one case."""
    files = ("test_contract.py::", "test_theory.py::")
    return any(file in getattr(report, "nodeid", "") for file in files) and "[" in getattr(report, "nodeid", "")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums differ between one and two threads in the last bit; the ranks run with one."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _frugal() -> Iterator[None]:
    """What costs a second or more each time is asked for where it is tested, and left out elsewhere.

    Training runs start from a process that has torch already. Commands take one process, as the other cores have tests
    of their own to run. Reports have no PDFs, and their figures' parts lie where matplotlib puts them at first. PDFs
    draw letters instead of embedding the font's part that they need. No file waits for the disk: nothing here
    outlives a power cut.
    """
    from gradlab.analysis import parallel as shared_out
    from gradlab.analysis.figures import drawn, style
    from gradlab.training import launch

    def rendered(figure: Any, name: str, formats: Sequence[str]) -> dict[str, bytes]:
        figure.set_layout_engine("none")
        return style.render(figure, name, formats[:1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "interpreter", python)
        patch.setattr(shared_out, "default_workers", lambda: 1)
        patch.setitem(style.RC, "pdf.fonttype", 3)
        patch.setattr(drawn, "render", rendered)
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four ranks under torchrun on Gloo, for all distributed tests: a start costs seconds, a task milliseconds."""
    with ProcessPool(world_size=4, log=tmp_path_factory.mktemp("pool") / "torchrun.log") as running:
        yield running


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small corpus, made by the first worker that asks; whoever alters it takes a copy."""
    from support.small_corpus import make_corpus

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers
    with (shared / "corpus of all").open("a+") as place:
        fcntl.flock(place, fcntl.LOCK_EX)
        place.seek(0)
        if not (made := place.read()):
            made = str(make_corpus(tmp_path_factory.mktemp("corpus")))
            place.write(made)
    return Path(made)


@pytest.fixture
def gradlab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; its exit code, standard output and standard error."""
    from gradlab.cli.main import main

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gradlab", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run
