"""Work that is shared out: in order, counted, with one thread, and the same in several processes as in one."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradlab.analysis.parallel import one_thread, share_out
from gradlab.analysis.replay import parts_of, replay, replay_plans
from gradlab.analysis.report.examine import examine
from gradlab.analysis.report.look import QUICK
from gradlab.artifact import Artifact
from gradlab.cli.console import warnings_as_lines
from gradlab.errors import GradlabError
from gradlab.jsonable import plain
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace
from support.command_line import Command
from support.recorded import random_gradients, record

LAYERS = (
    Layer("stem.weight", (8, 4, 3, 3), "convolution"),
    Layer("body.weight", (24, 16), "linear"),
    Layer("head.weight", (12, 24), "linear"),
    Layer("head.bias", (12,), "bias"),
)


@pytest.fixture(autouse=True)
def worth_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small replays start processes, too, in this file."""
    monkeypatch.setattr("gradlab.analysis.replay.run._WORTH_PROCESSES", 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_progress_counts_their_sizes(workers: int) -> None:
    seen: list[tuple[str, int, int]] = []
    results = share_out(
        divmod,
        [(number, 2) for number in range(4)],
        workers=workers,
        what="halves",
        sizes=[1, 0, 30, 5],
        progress=lambda *call: seen.append(call),
    )
    assert results == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [what for what, _, _ in seen] == ["halves"] * 5
    done = [count for _, count, _ in seen]
    assert (done[0], done[-1], done) == (0, 37, sorted(done))
    if workers == 1:
        assert done == [0, 30, 35, 36, 37]  # the largest first


def test_one_thread_computes_and_threads_are_given_back() -> None:
    threads = torch.get_num_threads() + 1
    torch.set_num_threads(threads)
    assert share_out(torch.get_num_threads, [()]) == [1]
    assert torch.get_num_threads() == threads
    with pytest.raises(ValueError, match="within"), one_thread():
        raise ValueError("within")
    assert torch.get_num_threads() == threads
    torch.set_num_threads(threads - 1)


def test_nothing_to_do_and_nobody_to_do_it() -> None:
    assert share_out(divmod, [], workers=2) == []
    with pytest.raises(GradlabError, match="workers = 0, expected at least 1"):
        share_out(divmod, [(1, 1)], workers=0)


def test_two_processes_replay_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several plans; one that cannot be replayed says why, and takes nothing from the others."""
    layers = [
        Layer("a.weight", (12, 8), "linear"),
        Layer("b.weight", (12, 9), "linear"),
        Layer("head.bias", (5,), "bias"),
    ]
    plans = {codec: Plan.uniform(tuple(layers), codec, minimum_numel=50) for codec in ("topk", "powersgd")}
    assert plans["topk"].dense_layers == (layers[2],)
    plans["other"] = Plan.uniform((Layer("c.weight", (12, 8), "linear"),), "topk", minimum_numel=1)
    with record(tmp_path / "t", random_gradients(3, 5, 2, layers), layers) as trace:
        one, two = (replay_plans(trace, plans, start=1, workers=workers) for workers in (1, 2))
        assert list(one) == list(two) == list(plans)
        for replays in (one, two):
            assert "c.weight" in str(replays["other"])
        for codec in ("topk", "powersgd"):
            alone = replay(trace, plans[codec], start=1)
            assert one[codec].layer_errors == two[codec].layer_errors == alone.layer_errors
            assert [s.iteration for s in two[codec].steps] == [s.iteration for s in alone.steps]
        monkeypatch.setattr("gradlab.analysis.replay.run._PART_VALUES", 100)
        assert len(parts_of(plans["topk"], 2)) > 1
        parts = [replay(trace, plans["topk"], workers=workers) for workers in (1, 2)]
        assert parts[0].layer_errors == parts[1].layer_errors
        values = 4 * 2 * sum(layer.numel for layer in layers[:2])
        monkeypatch.setattr("gradlab.analysis.replay.run._WORTH_PROCESSES", values + 1)
        monkeypatch.setattr("gradlab.analysis.parallel._in_processes", None)  # so few are replayed here
        assert replay(trace, plans["topk"], start=1, workers=2).layer_errors == one["topk"].layer_errors


def test_what_workers_warn_of_is_one_line_here(capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        with warnings_as_lines():
            share_out(warnings.warn, [("figures lack glyphs",)] * 4, workers=2)
            share_out(np.multiply, [(np.float32(1e38), np.float32(1e9))] * 4, workers=2)
    assert capfd.readouterr().err.splitlines() == ["warning: figures lack glyphs"]


# --- everything that is shared out ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `trace`, of 2 ranks, and two artifacts."""
    folder = tmp_path_factory.mktemp("shared")
    record(folder / "trace", random_gradients(0, 24, 2, LAYERS), LAYERS).close()
    for name, settings in (("topk", {"density": 0.1}), ("powersgd", {"rank": 2})):
        Artifact(Plan.uniform(LAYERS, name, warmup_steps=0, **settings)).save(folder / f"{name}.safetensors")
    return folder


def measured(value: Any) -> Any:
    """JSON without what differs from run to run: times."""
    if isinstance(value, dict):
        return {
            key: measured(part)
            for key, part in value.items()
            if not any(word in key for word in ("seconds", "codec_wall"))
        }
    return [measured(part) for part in value] if isinstance(value, list) else value


@pytest.mark.thorough
def test_everything_is_measured_the_same_in_two_processes(folder: Path) -> None:
    plans = {name: Artifact.load(folder / f"{name}.safetensors").plan for name in ("topk", "powersgd")}
    found = []
    for workers in (1, 2):
        with Trace(folder / "trace") as trace:
            result = examine(trace, plans=plans, look=QUICK, workers=workers)
        parts = {"spectrum": result.spectrum, "replays": result.replays, "remarks": result.remarks, **result.measured}
        found.append(measured(plain(parts)))
    here, there = found
    assert here == there
    assert {"between_nodes", "limits", "noise_scale", "sign_blocks", "slice_structure"} <= set(here)
    assert set(here["replays"]) == set(plans)


@pytest.mark.thorough
def test_replays_are_the_same_in_two_processes(gradlab: Command, folder: Path) -> None:
    artifacts = [folder / "topk.safetensors", folder / "powersgd.safetensors"]
    replays = []
    for words in (["--workers", 1], ["--workers", 2]):
        code, text, error = gradlab("evaluate", folder / "trace", *artifacts, "--json", *words)
        assert code == 0, error
        replays.append(measured(json.loads(text)))
    assert replays[0] == replays[1]
    assert set(replays[0]) == {"topk", "powersgd"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [
        ["gradiveq", "--samples", 8, "-s", "slice_size=48"],
        ["lgreco", "--codec", "topk", "--set", "density=0.1"],
        ["lgc", "--density", 0.1, "-s", "epochs=2", "--warmup-steps", 0],
        ["signs", "--scales", 4],
        ["uniform", "--codec", "qsgd", "--set", "bits=4"],
    ],
    ids=lambda words: words[0],
)
def test_fits_are_the_same_in_two_processes(
    gradlab: Command, folder: Path, tmp_path: Path, method: list[object]
) -> None:
    artifacts = []
    for words in (["--workers", 1], ["--workers", 2]):
        out = tmp_path / f"{len(artifacts)}.safetensors"
        code, _, error = gradlab("fit", method[0], folder / "trace", *method[1:], "--out", out, *words)
        assert code == 0, error
        artifacts.append(Artifact.load(out))
    here, there = artifacts
    assert here.plan.digest == there.plan.digest  # what was learned included
    assert measured(here.provenance) == measured(there.provenance)


WORKERS_MASKS = """
import signal
from gradlab.analysis.parallel import share_out

def blocked():
    return [signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])]

if __name__ == "__main__":
    print(sum(share_out(blocked, [()] * 6, workers=2), []), blocked())
"""


@pytest.mark.thorough  # as is the campaign `interrupts`
def test_workers_take_no_interrupt_from_their_start_on(tmp_path: Path) -> None:
    """In a new process, whose first workers come with the trackers that let interrupts through."""
    script = tmp_path / "masks.py"
    script.write_text(WORKERS_MASKS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == f"{[True] * 6} [False]\n"
