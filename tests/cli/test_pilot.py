"""`gradlab pilot`: the user's own command, once for plain DDP, once for 16 bits, once for each plan."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gradlab.artifact import Artifact
from gradlab.capture import EmulatedNodes
from gradlab.errors import GradlabError
from gradlab.layout import layers_of
from gradlab.plan import Plan, Wrap
from gradlab.trial import VARIABLE, LossFile, TrialSettings, read_losses
from gradlab.trial.run import run_trial
from jobs.piloted_job import EVERY, network
from support.command_line import Command
from support.recorded import random_gradients, record
from support.warm_python import python

HERE = Path(__file__).parents[1]
START, STEPS = 3, 8


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trace, a plan, and a plan that the script's optimizer does not go with."""
    folder = tmp_path_factory.mktemp("piloted")
    layers = layers_of(network())
    record(folder / "trace", random_gradients(0, 4, 2, layers), layers)
    Artifact(Plan.uniform(layers, "qsgd", bits=8, minimum_numel=1)).save(folder / "fine.safetensors")
    momentum = [Wrap("momentum_correction", {"momentum": 0.9})]
    Artifact(Plan.uniform(layers, "topk", density=0.1, wrappers=momentum)).save(folder / "twice.safetensors")
    return folder


def training(trace: Path, way: str) -> list[str]:
    """A command that trains on two ranks."""
    torchrun = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*torchrun, str(HERE / "jobs/piloted_job.py"), str(trace), way]


@pytest.mark.parametrize(
    ("way", "every"),
    [("by_hand", 1), *(pytest.param(*one, marks=pytest.mark.thorough) for one in (("sharded", 1), ("outer", EVERY)))],
)
def test_each_line_of_gradlab_takes_the_plan_and_logs_losses(place: Path, tmp_path: Path, way: str, every: int) -> None:
    """A step of the outer loop has the losses of its local steps."""
    plan, folder = Artifact.load(place / "fine.safetensors").plan, tmp_path / "run"
    settings = TrialSettings(replace(plan, schedule=replace(plan.schedule, warmup_steps=START)), START + STEPS)
    ended = run_trial(training(place / "trace", way), folder, settings)
    assert ended.problem is None, ended.output
    for rank, logged in enumerate(ended.losses.by_rank):
        own = [float(loss) for loss in (folder / f"seen-{rank}").read_text("utf-8").split()]
        assert logged == tuple(map(sum, zip(*[iter(own)] * every, strict=True)))
        assert len(logged) == START + STEPS
    assert not (folder / "went on").exists()


def test_a_script_is_run_once_per_plan_with_no_change_to_it(place: Path, gradlab: Command) -> None:
    trace, out = place / "trace", place / "best.safetensors"
    before = {path: path.read_bytes() for path in trace.rglob("*") if path.is_file()}
    plans = [word for name in ("fine", "twice") for word in ("--plan", place / f"{name}.safetensors")]
    options = ["--steps", STEPS, "--start", START, "--max-loss", "20%", "--json"]
    words = ["pilot", trace, "--out", out, *plans, *options, "--", *training(trace, "recorded")]
    code, printed, err = gradlab(*words)
    assert code == 0, err
    result = json.loads(printed)
    assert [one["name"] for one in result["outcomes"]] == ["fine", "16 bits"]
    assert all(one["steps"] == STEPS and abs(one["excess"]) < 0.1 for one in result["outcomes"])
    assert result["same_batches"]
    assert result["best"] == "fine"
    assert "GradlabError: the plan applies momentum" in result["failed"]["twice"]
    assert {path: path.read_bytes() for path in trace.rglob("*") if path.is_file()} == before

    saved = Artifact.load(out)
    assert saved.plan.schedule.warmup_steps == START
    assert saved.provenance["pilot"]["best"] == "fine"
    assert json.loads(Path(f"{out}.pilot.json").read_text(encoding="utf-8"))["outcomes"] == result["outcomes"]

    runs = [Path(f"{out}.pilot") / f"run-0{number}" for number in (1, 2, 3)]
    for run in runs:  # plain DDP, 16 bits, fine
        losses = read_losses(run)
        assert [len(own) for own in losses.by_rank] == [START + STEPS] * 2
        for rank, own in enumerate(losses.by_rank):
            assert own == tuple(map(float, (run / f"seen-{rank}").read_text(encoding="utf-8").split()))
        assert not (run / "went on").exists()
    dense, half, fine = map(read_losses, runs)
    assert dense.first(START + 1) == half.first(START + 1) == fine.first(START + 1)
    assert dense != half != fine


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([], "no command that trains: put it last, behind --, such as -- torchrun train.py"),
        (["no-such-program"], "no-such-program: no such command"),
        (["true"], "true: no line of gradlab ran in it"),
        (["sh", "-c", "echo what happened; exit 3"], "what happened"),
    ],
)
def test_a_command_that_cannot_be_tried_is_one_clear_error(
    place: Path, gradlab: Command, tmp_path: Path, command: list[str], said: str
) -> None:
    out = tmp_path / "plan.safetensors"
    code, _, err = gradlab("pilot", place / "trace", "--out", out, "--", *command)
    assert code == 2
    assert said in err
    assert not out.exists()


def test_an_interrupt_leaves_no_process(tmp_path: Path) -> None:
    """Also not one that has left its session, as torchrun's ranks do."""
    plan = Plan(layers_of(network()), ())

    def interrupt(losses: object) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_trial(["sh", "-c", "setsid sleep 60 & sleep 60"], tmp_path / "run", TrialSettings(plan, 8), interrupt)
    mark = f"{VARIABLE}={tmp_path / 'run'}".encode()
    left, until = [True], time.monotonic() + 5
    while left and time.monotonic() < until:
        left = [one for one in Path("/proc").glob("[0-9]*/environ") if _reads(one, mark)]
    assert not left


def _reads(path: Path, mark: bytes) -> bool:
    try:
        return mark in path.read_bytes()
    except OSError:
        return False


# --- emulated ranks -----------------------------------------------------------------------------------------------


def emulated(folder: Path, steps: int) -> list[torch.Tensor]:
    """Train a network between three emulated ranks."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with EmulatedNodes(model, folder, world_size=3, optimizer=optimizer) as nodes:
        for _ in range(steps):
            optimizer.zero_grad()
            for rank in range(3):
                inputs = torch.randn(8, 16, generator=generator)
                with nodes.node(rank):
                    loss = nn.functional.cross_entropy(model(inputs), inputs[:, :4].argmax(1))
                    loss.backward()
                    nodes.annotate(loss=loss)
            nodes.average()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("codec", ["none", "identity", "sign"])
def test_emulated_ranks_train_on_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Without compression bit for bit as when they record; and never a trace."""
    layers = layers_of(network())
    plan = Plan(layers, ()) if codec == "none" else Plan.uniform(layers, codec, minimum_numel=1)
    expected = emulated(tmp_path / "trace", 5)
    folder = tmp_path / "run"
    folder.mkdir()
    TrialSettings(plan, 6).save(folder)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)  # put back after the test
    monkeypatch.setenv(VARIABLE, str(folder))
    found = emulated(tmp_path / "trace", 5)
    assert all(map(torch.equal, expected, found)) == (codec != "sign")
    assert [len(own) for own in read_losses(folder).by_rank] == [5, 5, 5]


# --- what ranks have written --------------------------------------------------------------------------------------

numbers = st.floats(width=32)


@given(st.lists(st.lists(numbers, max_size=6), min_size=1, max_size=3), st.data())
def test_losses_are_read_as_far_as_all_ranks_have_written_them(
    tmp_path_factory: pytest.TempPathFactory, by_rank: list[list[float]], data: st.DataObject
) -> None:
    """Whatever is not finite is NaN, and a line that is cut off does not count."""
    folder = tmp_path_factory.mktemp("losses")
    for rank, losses in enumerate(by_rank):
        file = LossFile(folder, rank, len(by_rank), 2)
        for loss in losses:
            file.add(loss)
    cut = folder / "losses-00000.jsonl"
    whole = cut.read_bytes()
    cut.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    expected = [[loss if math.isfinite(loss) else math.nan for loss in losses] for losses in by_rank]
    expected[0] = expected[0][: max(0, cut.read_bytes().count(b"\n") - 1)]

    found = read_losses(folder)
    every = len(by_rank) > 1 or b"\n" in cut.read_bytes()
    assert repr([list(own) for own in found.by_rank]) == repr(expected if every else [])
    assert len(found.means) == found.steps == min(map(len, expected))
    for step, mean in enumerate(found.means):
        values = [own[step] for own in expected]
        assert mean == pytest.approx(sum(values) / len(values), nan_ok=True, abs=1e-30)


def test_a_file_that_no_rank_wrote_is_refused(tmp_path: Path) -> None:
    alone = '{"rank": 0, "world_size": 1, "exchanging": 1}\n'
    for text, said in (
        ("{}\n", "line 1"),
        ('{"rank": 1, "world_size": 2, "exchanging": 2}\n', "which is not this file's"),
        ('{"rank": 0, "world_size": 100000000, "exchanging": 2}\n', "which is not this file's"),
        (f'{alone}{{"loss": "low"}}\n', "line 2: loss is 'low'"),
        (f"{alone}\x00\x01\n", "line 2: b'\\x00\\x01' is not JSON"),
    ):
        (tmp_path / "losses-00000.jsonl").write_text(text, encoding="utf-8")
        with pytest.raises(GradlabError) as refusal:
            read_losses(tmp_path)
        assert said in str(refusal.value)


def test_without_the_variable_there_is_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradlab.trial import trial

    monkeypatch.delenv(VARIABLE, raising=False)
    assert trial() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(GradlabError, match="no trial of gradlab pilot"):
        trial()
    assert os.listdir(tmp_path) == []
