"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from command_line import Command
from contract import cases
from hypothesis import settings
from process_pool import ProcessPool
from warm_python import python

from gradlab.cli import launch
from gradlab.cli.main import main

settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("fixed")  # --hypothesis-profile comes later, and wins


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many codec x case pairs of the contract ran, and which did not."""
    outcomes = ("passed", "failed", "error", "skipped", "xfailed")
    reports = {what: [r for r in terminalreporter.stats.get(what, []) if _of_contract(r)] for what in outcomes}
    ran = {report.nodeid for some in reports.values() for report in some}
    if not ran:
        return
    codecs = {case for case in cases() if any(case in node.partition("[")[2] for node in ran)}
    counts = ", ".join(f"{len(some)} {what}" for what, some in reports.items())
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
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _warm_launches() -> Iterator[None]:
    """Training runs start from a process that has torch already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "interpreter", python)
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPool]:
    """Four ranks under torchrun on Gloo, for all distributed tests: a start costs seconds, a task milliseconds."""
    with ProcessPool(world_size=4, log=tmp_path_factory.mktemp("pool") / "torchrun.log") as running:
        yield running


@pytest.fixture
def gradlab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; its exit code, standard output and standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["gradlab", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run
