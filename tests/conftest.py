"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from command_line import Command
from process_pool import ProcessPool

from gradlab.cli.main import main


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Sums differ between one and two threads in the last bit; the ranks run with one."""
    torch.set_num_threads(1)


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
