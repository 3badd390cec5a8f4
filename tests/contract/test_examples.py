"""The examples in public docstrings hold, and every public class and function that can show itself at work does."""

from __future__ import annotations

import doctest
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias

import pytest
import torch
import torch.distributed as dist

from gradlab import codecs, wrappers
from gradlab.codec.registry import CODECS
from support.reference import IMPORTED, documented, write_recording

SUBJECTS = {
    name: thing
    for name, thing in documented().items()
    if (inspect.isclass(thing) or inspect.isroutine(thing)) and not isinstance(thing, GenericAlias)  # 3.10's is a class
}
# What a function returns or takes is shown where the function is; what the tutorial writes is shown there. FSDP2 needs
# a mesh of several ranks, hooks are DDP's to call, and reports take seconds. The list may only get shorter.
SHOWN_ELSEWHERE = {
    "gradlab.analysis.BlockFit",
    "gradlab.analysis.Examination",
    "gradlab.analysis.GradiveqFit",
    "gradlab.analysis.LgcFit",
    "gradlab.analysis.LgcOptions",
    "gradlab.analysis.LgrecoFit",
    "gradlab.analysis.LgrecoOptions",
    "gradlab.analysis.fit_lgc",
    "gradlab.analysis.forecast.Forecast",
    "gradlab.analysis.forecast.NodeForecast",
    "gradlab.analysis.replay.Replay",
    "gradlab.analysis.replay.ReplayStep",
    "gradlab.analysis.replay.ReplaySummary",
    "gradlab.analysis.replay.refresh_remark",
    "gradlab.analysis.write_comparison",
    "gradlab.analysis.write_trace_report",
    "gradlab.capture.RecorderReport",
    "gradlab.capture.RepairedRank",
    "gradlab.capture.capture_hook",
    "gradlab.codec.Compressor",
    "gradlab.codec.Sparsifier",
    "gradlab.codecs.register",
    "gradlab.collectives.LockstepResult",
    "gradlab.collectives.Received",
    "gradlab.collectives.Ring",
    "gradlab.plan.LgcRecipe",
    "gradlab.plan.PayloadParts",
    "gradlab.runtime.FSDPCompression",
    "gradlab.runtime.compress_fsdp",
    "gradlab.runtime.compression_hook",
    "gradlab.trace.RankCheck",
    "gradlab.trace.RankProgress",
    "gradlab.trace.TraceCheck",
    "gradlab.trace.TraceProgress",
    "gradlab.trace.TraceStep",
}


def examples(name: str) -> list[doctest.DocTest]:
    """Examples of a class or function and, of a class, of its own methods."""
    thing = SUBJECTS[name]
    module = sys.modules[thing.__module__]
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for test in finder.find(thing, name, module, globs=dict(IMPORTED)) if test.examples]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    write_recording(folder / "trace")
    return folder


@pytest.fixture
def surroundings(recording: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """What docs/reference/index.md promises: a recording in the folder `trace`, and a process group of one rank."""
    (tmp_path / "trace").symlink_to(recording / "trace")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CODECS, "registered", dict(CODECS.registered))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    yield
    torch.set_rng_state(state)
    dist.destroy_process_group()


# One rank has nothing to compress and records nobody else: both say so.
@pytest.mark.filterwarnings("ignore:gradlab. world size 1", "ignore:recording one rank alone")
@pytest.mark.parametrize("name", sorted(set(SUBJECTS) - SHOWN_ELSEWHERE))
def test_a_public_name_shows_itself_at_work(name: str, surroundings: None) -> None:
    tests = examples(name)
    assert tests, f"{name}: no example"
    for test in tests:
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        assert runner.run(test).failed == 0


def test_what_is_shown_elsewhere_has_no_example_of_its_own() -> None:
    assert set(SUBJECTS) >= SHOWN_ELSEWHERE
    assert not [name for name in SHOWN_ELSEWHERE if examples(name)]


def test_every_codec_and_wrapper_is_among_them() -> None:
    methods = {*map(codecs.get, codecs.names()), *map(wrappers.get, wrappers.names())}
    assert methods <= set(SUBJECTS.values())
