"""The commands as a user types them: the whole loop on a real run, and every kind of bad input."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from gradlab import codecs
from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.replay import replay
from gradlab.analysis.report.examine import examine
from gradlab.artifact import Artifact
from gradlab.cli.main import app
from gradlab.codec.settings import fields_of
from gradlab.datasets import get
from gradlab.formatting import format_ratio
from gradlab.layout import Layer
from gradlab.plan import Plan
from gradlab.trace import Trace
from gradlab.training.launch import launch, save_report
from gradlab.training.settings import TrainSettings
from support.command_line import Command
from support.recorded import CONVOLUTION, random_gradients, record, record_layer
from support.small_disk import make_read_only, small_disk

STEPS, WARMUP = 16, 4
WIDE = Layer("wide.weight", (64, 64), "linear")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `trace`, a recording of digits on two ranks, and its dense run's report."""
    folder = tmp_path_factory.mktemp("loop")
    report = launch(TrainSettings("digits", steps=STEPS, capture=str(folder / "trace"), name="dense"))
    save_report(report, folder / "dense.json")
    return folder


@pytest.fixture(scope="module")
def topk(loop: Path) -> Path:
    """The artifact that `gradlab fit uniform --warmup-steps` writes."""
    with Trace(loop / "trace") as trace:
        plan = Plan.uniform(trace.layers, "topk", density=0.01, warmup_steps=WARMUP)
        return uniform_artifact(plan, replay(trace, plan)).save(loop / "topk.safetensors")


def test_the_loop(gradlab: Command, loop: Path, topk: Path, tmp_path: Path) -> None:
    """Recorded, fitted and trained: the dense run's bits until compression begins, and the errors that were predicted.

    The run sends in each step what its replay and the plan's forecast say, and shows the spans of the step named.
    """
    report, spans = tmp_path / "run.json", tmp_path / "spans.json"
    words = ["train", "digits", "--steps", STEPS, "--compress", topk, "--out", report]
    code, out, err = gradlab(*words, "--chrome-trace", spans, "-s", f"trace_steps=[{WARMUP + 1}]")
    assert code == 0, err
    dense, run = (json.loads(file.read_text()) for file in (loop / "dense.json", report))
    with Trace(loop / "trace") as trace:
        assert Artifact.load(topk).provenance["trace"] == trace.digest
        recorded = [trace.scalars(rank)["loss"] for rank in range(2)]
    assert dense["losses"] == pytest.approx([(a + b) / 2 for a, b in zip(*recorded, strict=True)], rel=1e-6)
    assert run["losses"][: WARMUP + 1] == dense["losses"][: WARMUP + 1]  # the same bits until it acts
    assert run["losses"][WARMUP + 1] != dense["losses"][WARMUP + 1]
    for word in ("final accuracy", "payload per step", "compute per step", "wait per step"):
        assert word in out
    assert f"{format_ratio(run['ratio_to_16_bits'])} vs 16 bits)" in out
    assert set(run["time"]) == {"compute", "compress", "communicate", "wait"}
    assert run["rules"] == []

    code, out, err = gradlab("evaluate", loop / "trace", topk, "--json")
    assert code == 0, err
    steps = [step for step in json.loads(out)["topk"]["steps"] if step["compressing"]]
    predicted = {step["iteration"]: step["contribution_error"] for step in steps}
    observed = dict(zip(run["errors"]["steps"], run["errors"]["relative"], strict=True))
    assert sorted(observed) == sorted(predicted) == list(range(WARMUP, STEPS))
    assert observed[WARMUP] == pytest.approx(predicted[WARMUP], rel=1e-5)
    assert 0.8 < median(predicted[step] / observed[step] for step in observed) < 1.25
    for bytes_of in ("payload_bytes", "wire_bytes"):
        sent = {step[f"{bytes_of}_{of}"] for step in steps for of in ("mean", "max")}
        assert sent == set(run[f"{bytes_of}_per_step"].values())
    assert run["payload_bytes_per_step"]["mean"] == run["forecast_payload_bytes"]

    code, out, err = gradlab("predict", topk, "--compute-seconds", report, "--nodes", 2, "--json")
    assert code == 0, err
    profile = json.loads(out)["profile"]
    assert profile["compute_seconds"] == run["time"]["compute"]
    assert profile["codec"]["seconds"] == run["time"]["compress"]

    events = json.loads(spans.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {WARMUP + 1}
    picture = tmp_path / "pictures" / "timeline.svg"
    code, out, err = gradlab("inspect", spans, "--rank", 1, "--out", picture)
    assert code == 0, err
    assert all(word in out for word in ("spans", "exposed", str(picture)))
    assert b"<svg" in picture.read_bytes()


@pytest.mark.thorough
def test_demo_goes_round_the_loop(gradlab: Command, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    code, printed, err = gradlab("demo", "--out", folder, "--steps", 32)
    assert code == 0, err
    assert "a step instead of" in printed
    for word in ("final accuracy", "payload/step", "vs 16 bits", "error predicted", "error observed", "communicate"):
        assert word in printed
    assert str(folder / "report" / "report.html") in printed.replace("\n", "")
    dense = json.loads((folder / "dense.json").read_text())
    for name in ("gradiveq", "topk", "powersgd"):
        run = json.loads((folder / f"{name}.json").read_text())
        assert run["compression_ratio"] > 4
        assert run["payload_bytes_per_step"]["mean"] == run["forecast_payload_bytes"]
        assert run["losses"][:9] == dense["losses"][:9]


@pytest.mark.thorough
def test_a_plan_with_wrappers_trains(gradlab: Command, loop: Path, tmp_path: Path) -> None:
    """DGC from the command line: the trainer leaves momentum to the plan."""
    artifact, report = tmp_path / "dgc.safetensors", tmp_path / "run.json"
    words = ["fit", "uniform", loop / "trace", "--codec", "topk", "--set", "density=0.01", "--out", artifact]
    words += ["--wrap", "momentum_correction:momentum=0.9,nesterov=true", "--wrap", "sparsity_warmup:steps=8"]
    code, _, err = gradlab(*words, "--warmup-steps", WARMUP)
    assert code == 0, err
    assert "momentum correction(nesterov=True" in " ".join(gradlab("inspect", artifact)[1].split())
    code, _, err = gradlab("train", "digits", "--steps", 20, "--compress", artifact, "--out", report)
    assert code == 0, err
    kept: dict[str, Any] = json.loads(report.read_text())
    assert kept["final_loss"] < kept["losses"][0]
    assert kept["residuals"].startswith("residuals are kept as they are as the plan says")
    assert kept["residuals"] in " ".join(err.split())


def test_trace_commands(gradlab: Command, loop: Path) -> None:
    code, out, _ = gradlab("trace", "info", loop / "trace", "--json")
    info = json.loads(out)
    assert (code, info["steps"], info["world_size"], info["steps_by_rank"]) == (0, STEPS, 2, [STEPS, STEPS])
    assert info["metadata"]["workload"] == "digits"
    for words in (["trace", "info"], ["trace", "check"], ["trace", "repair"]):
        assert gradlab(*words, loop / "trace")[0] == 0


def test_analyze_and_inspect(gradlab: Command, loop: Path, topk: Path, tmp_path: Path) -> None:
    code, out, err = gradlab("analyze", loop / "trace", "--quick", "--out", tmp_path / "report", "--only", " noise")
    assert code == 0, err
    assert "report.html" in out
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["trace"]["steps"] == STEPS
    assert "noise_scale" in {figure["name"] for figure in report["figures"]}
    assert out.startswith(report["verdict"])
    assert report["noise_scale"]["batch_size"] == report["trace"]["metadata"]["batch_size"]
    code, _, err = gradlab("analyze", loop / "trace", "--out", tmp_path / "report")
    assert (code, "exists already" in err) == (2, True)
    code, out, _ = gradlab("inspect", topk, "--json")
    plan = Artifact.load(topk).plan
    assert json.loads(out)["digest"] == plan.digest
    expected = json.loads(out)["expected"]
    assert expected["payload_bytes"] == plan.payload_bytes(2)
    assert expected["ratio_to_16_bits"] == expected["dense_payload_bytes"] / 2 / expected["payload_bytes"]
    shown = gradlab("inspect", topk)[1]
    assert "topk(density=0.01) + two way from 5 ranks + feedback" in shown
    assert f"fewer ({format_ratio(expected['ratio_to_16_bits'])} vs 16 bits)" in " ".join(shown.split())
    assert "0.500x" in shown  # layers that stay dense


def test_the_report_of_a_sharded_model_says_what_its_link_is_busy_with(gradlab: Command, tmp_path: Path) -> None:
    layers = (Layer("body.weight", (64, 64), "linear"),)
    record(tmp_path / "trace", random_gradients(0, 2, 3, layers), layers, metadata={"fully_shard": True}).close()
    how = ("--quick", "--only", "payoff", "--nodes", "2x2", "--bandwidth", "1mbit", "--compute-seconds", "20ms")
    code, _, err = gradlab("analyze", tmp_path / "trace", *how, "--out", tmp_path / "report")
    assert code == 0, err
    page = (tmp_path / "report" / "report.html").read_text()
    assert "shards between 2 nodes: gathers of parameters inside nodes (32 bits)" in page
    assert "most time goes to gradients between nodes (1 Mbit/s)" in page


def test_a_fit_to_noise_is_seen_through(gradlab: Command, tmp_path: Path) -> None:
    """Fitted on the steps it is replayed on, its error is shown from later ones; the verdict comes before tables."""
    noise = np.random.default_rng(0).standard_normal((24, 2, CONVOLUTION.numel)).astype(np.float32)
    record_layer(tmp_path / "trace", noise, CONVOLUTION).close()
    artifact, words = tmp_path / "gradiveq.safetensors", ["--samples", 12, "-s", "start=0", "--warmup-steps", 2]
    code, out, err = gradlab(
        "fit", "gradiveq", tmp_path / "trace", "--out", artifact, "--paper", "-s", "loss_threshold=0", *words
    )
    assert (code, err) == (0, "")
    assert out.startswith("The GradiVeQ fit holds nothing that lasts")
    settings = Artifact.load(artifact).plan.groups[0].settings
    assert (settings["sample_steps"], settings["compressed_steps"], settings["refresh"]) == (12, 48, "sample")
    assert 0 < out.index("warning: Compression begins at iteration 2") < out.index("GradiVeQ fit, layer by layer")
    code, out, err = gradlab("evaluate", tmp_path / "trace", artifact)
    assert code == 0, err
    assert out.index("warning: gradiveq: The plan was fitted on 10 of") < out.index("Plans replayed on the trace")
    assert "in-sample" in out
    summary = json.loads(gradlab("evaluate", tmp_path / "trace", artifact, "--json")[1])["gradiveq"]["summary"]
    assert summary["in_sample"]["aggregate_error"] < 1e-3 < 0.7 < summary["aggregate_error"]


def test_a_trace_that_no_fit_can_use_is_analysed_without(tmp_path: Path) -> None:
    unknown = Layer("table", (5, 6), "other")
    with record(tmp_path / "trace", random_gradients(0, 6, 2, [unknown]), [unknown]) as trace:
        found = examine(trace, parts=["within"])
    assert found.fit is None
    assert "No GradiVeQ fit: " in found.remarks[0]
    assert "transposed_experts can be fitted (the trace holds none); there are other" in found.remarks[0]


def test_an_artifact_without_a_fit_bears_its_provenance(gradlab: Command, loop: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "topk.safetensors"
    code, out, err = gradlab("fit", "uniform", loop / "trace", "--codec", "topk", "--out", artifact)
    assert code == 0, err
    assert out.startswith("topk sends ")
    assert err == ""
    loaded = Artifact.load(artifact)
    assert loaded.provenance["payload_bytes"] == loaded.plan.payload_bytes(2) < loaded.provenance["dense_payload_bytes"]
    assert loaded.provenance["world_size"] == 2


def test_a_warning_is_one_clean_line(gradlab: Command, tmp_path: Path) -> None:
    words = ["--codec", "topk", "--role", "transposed_linear"]
    layers = [WIDE, Layer("narrow.weight", (32, 64), "transposed_linear")]
    trace = record(tmp_path / "trace", random_gradients(0, 2, 2, layers), layers)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as for a user: the tests make errors of warnings
        code, _, err = gradlab("fit", "uniform", trace.path, *words, "--out", tmp_path / "topk.safetensors")
    assert code == 0, err
    assert err.startswith("warning: topk compresses 33.3 % of the model's gradients")
    assert err.count("\n") == 1


def damaged(loop: Path, folder: Path, hurt: Callable[[Path], None]) -> Path:
    shutil.copytree(loop / "trace", folder / "trace")
    hurt(folder / "trace")
    return folder / "trace"


def newer(trace: Path) -> None:
    manifest = json.loads((trace / "manifest.json").read_text())
    (trace / "manifest.json").write_text(
        json.dumps({key: 99 if "version" in key else v for key, v in manifest.items()})
    )


def truncate(trace: Path) -> None:
    segment = next(trace.glob("rank-00001/*.h5"))
    segment.write_bytes(segment.read_bytes()[: segment.stat().st_size // 2])


@pytest.mark.parametrize(
    "hurt",
    [newer, truncate, lambda t: (t / "manifest.json").write_text("{"), lambda t: shutil.rmtree(t / "rank-00001")],
    ids=["newer", "truncated", "manifest", "rank missing"],
)
def test_damaged_traces(gradlab: Command, loop: Path, tmp_path: Path, hurt: Callable[[Path], None]) -> None:
    trace = damaged(loop, tmp_path, hurt)
    for words in (["trace", "info", trace], ["analyze", trace, "--out", tmp_path / "report"]):
        code, _, err = gradlab(*words)
        assert code == 2
        assert err.startswith("gradlab: ")
        assert "Traceback" not in err
    assert not (tmp_path / "report").exists()


def test_bad_input_is_one_line(gradlab: Command, loop: Path, topk: Path, tmp_path: Path) -> None:
    """Exit code 2, the thing named, no traceback, nothing written."""
    trace = loop / "trace"
    (tmp_path / "foreign").mkdir()
    (tmp_path / "text.safetensors").write_text("not a safetensors file")
    (tmp_path / "run.json").write_text("{}")
    other = Artifact(Plan.uniform(get("cifar10").model(0), "topk")).save(tmp_path / "other.safetensors")
    never = Plan.uniform(get("digits").model(0), "topk", warmup_steps=STEPS)
    late = Artifact(never).save(tmp_path / "late.safetensors")
    target = tmp_path / "x.safetensors"
    cases: dict[str, list[object]] = {
        "no such folder": ["trace", "info", tmp_path / "nowhere"],
        "not a gradlab trace": ["trace", "check", tmp_path / "foreign"],
        "no artifact at": ["inspect", tmp_path / "nowhere.safetensors"],
        "an artifact is inspected alone": ["inspect", topk, topk],
        "not a whole safetensors file": ["train", "digits", "--compress", tmp_path / "text.safetensors"],
        "another model": ["train", "digits", "--steps", 3, "--compress", other],
        "this plan is for another model": ["evaluate", trace, other],
        "one rank": ["train", "digits", "--ranks", 1, "--compress", topk],
        "--ranks 2 or more": ["train", "digits", "--ranks", 1, "--capture", tmp_path / "t"],
        "not both": ["train", "digits", "--capture", tmp_path / "t", "--compress", topk],
        "unknown workload": ["train", "imagenet"],
        "needs a path": ["train", "cifar10"],
        "nothing is overwritten": ["train", "digits", "--capture", trace],
        "expected at least 1": ["train", "digits", "--steps", 0],
        "train: no setting rate; known: learning_rate": ["train", "digits", "-s", "rate=1"],
        "setting threads = 1.5, expected int": ["train", "digits", "-s", "threads=1.5"],
        "exists already": ["fit", "gradiveq", trace, "--out", topk],
        "run.json exists already": ["train", "digits", "--out", tmp_path / "run.json"],
        "a chrome trace shows the engine": ["train", "digits", "--chrome-trace", tmp_path / "no.json"],
        "a figure is written as .svg or .pdf": ["inspect", tmp_path / "run.json", "--out", tmp_path / "a.png"],
        "record more": ["fit", "gradiveq", trace, "--out", target, "--samples", STEPS],
        "at least 2": ["fit", "gradiveq", trace, "--out", target, "--samples", 1],
        "share of variance in [0, 1)": ["fit", "gradiveq", trace, "--out", target, "-s", "loss_threshold=2"],
        "no codec 'topkk'; did you mean topk?": ["fit", "uniform", trace, "--codec", "topkk", "--out", target],
        "trained_with, codec, wrap, error_feedback, role; of codec topk: density": [
            *("fit", "uniform", trace, "--codec", "topk", "--set", "rank=2", "--out", target)
        ],
        "expected NAME=VALUE": ["fit", "uniform", trace, "--codec", "topk", "--set", "density", "--out", target],
        **{
            message: ["fit", "uniform", trace, "--codec", "topk", "--out", target, "--wrap", wrap]
            for wrap, message in (
                ("eror_feedback", "no wrapper 'eror_feedback'; did you mean error_feedback?"),
                ("error_feedback:decay", "--wrap error_feedback decay: expected NAME=VALUE"),
                ("error_feedback:decay=2", "error_feedback: setting decay = 2, expected a share in [0, 1)"),
            )
        },
        "is not empty": ["demo", "--out", trace],
        "needs at least 30": ["demo", "--out", tmp_path / "d", "--steps", 3],
        "nothing to replay": ["evaluate", trace, topk, "--start", 5, "--stop", 2],
        f"{late}: {trace}: ends at iteration {STEPS - 1}, the plan is dense": ["evaluate", trace, topk, late],
    }
    for expected, words in cases.items():
        code, out, err = gradlab(*words)
        assert (code, out) == (2, ""), words
        assert err.startswith("gradlab: "), words
        assert expected in err, (words, err)
        assert "Traceback" not in err
    assert not target.exists()
    assert not (tmp_path / "t").exists()
    assert not (tmp_path / "d").exists()


def test_the_help_of_each_command_has_an_example() -> None:
    program = get_command(app)
    names = [[name] for name in program.list_commands(None) if name not in ("fit", "trace")]
    names += [["trace", name] for name in ("info", "check", "repair")]
    for words in names:
        command = program
        for word in words:
            command = command.get_command(None, word)
        assert f"gradlab {' '.join(words)} " in command.help, words


@pytest.mark.thorough  # as is the campaign `interrupts`
def test_an_interrupt_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradlab", "train", "digits", "--steps", "100000"]

    def listen() -> None:  # a shell's background job, as the tests may be, is told to ignore interrupts
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=listen) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 120
        while not (launched := children.read_text(encoding="utf-8").split()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "gradlab: interrupted\n")
    assert launched
    deadline = time.monotonic() + 30  # an ended child is there until it is waited for
    while (left := [child for child in launched if Path(f"/proc/{child}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_a_read_only_disk_is_one_line(gradlab: Command, tmp_path: Path) -> None:
    """What reads works there, and what would write says so, as before it begins to train."""
    with small_disk(tmp_path, 2**28) as disk:
        record(disk / "trace", random_gradients(0, 2, 2, [WIDE]), [WIDE]).close()
        make_read_only(disk)
        assert gradlab("trace", "check", disk / "trace")[0] == 0
        for words in (
            ["fit", "uniform", disk / "trace", "--codec", "topk", "--out", disk / "new" / "plan.safetensors"],
            ["trace", "repair", disk / "trace"],
            ["train", "digits", "--steps", 3, "--out", disk / "new" / "run.json"],
            ["train", "digits", "--steps", 3, "--emulate", 2, "--capture", disk / "other"],
        ):
            code, _, err = gradlab(*words)
            assert code == 2, words
            assert err.count("\n") == 1, (words, err)
            assert "Read-only file system" in err, (words, err)


INTERRUPTED_IMPORT = """
import os, signal, sys

class Module:  # an import that takes an interrupt for a reason to fail otherwise, as numpy's may
    def __getattr__(self, name):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("of a module that is half there")

import gradlab.start
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is told to ignore interrupts
sys.modules["gradlab.cli.main"] = Module()
gradlab.start.main()
"""


def test_an_interrupted_import_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "gradlab: interrupted\n")
    broken = INTERRUPTED_IMPORT.replace("os.kill(os.getpid(), signal.SIGINT)", "raise KeyError(1)")
    done = subprocess.run([sys.executable, "-c", broken], capture_output=True, text=True, check=False)
    assert "KeyError" in done.stderr  # what nobody interrupted is told as it is


INTERRUPTED_MODULE = """
import sys, types

def main():
    import a_module_that_is_interrupted
    time.sleep(10)
    print("not reached")

import gradlab.start, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.modules["gradlab.cli.main"] = types.SimpleNamespace(main=main)
gradlab.start.main()
"""


def test_an_import_ends_before_an_interrupt_counts(tmp_path: Path) -> None:
    """Extensions of PyTorch abort the process where it is raised in the middle of them."""
    module = tmp_path / "a_module_that_is_interrupted.py"
    module.write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.2)\nprint('whole')\n")
    command = [sys.executable, "-c", INTERRUPTED_MODULE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "whole\n", "gradlab: interrupted\n")


@pytest.mark.parametrize("group", [(), ("fit",), ("trace",)])
def test_each_command_says_in_a_few_whole_words_what_it_does(gradlab: Command, group: tuple[str, ...]) -> None:
    code, text, _ = gradlab(*group, "--help")
    lines = text.partition("Commands:")[2].strip().splitlines()
    assert code == 0
    assert len(lines) > 2
    assert all(len(line) < 80 and "..." not in line and len(line.split()) > 3 for line in lines)


@pytest.mark.parametrize(
    ("codec", "how"),
    [("PowerSGD", "gradlab fit uniform TRACE --codec powersgd"), ("lgc_ring", "gradlab fit lgc TRACE")],
)
def test_a_codec_that_is_no_kind_of_fit_is_explained(gradlab: Command, codec: str, how: str) -> None:
    code, printed, error = gradlab("fit", codec, "trace", "--out", "plan.safetensors")
    assert (code, printed) == (2, "")
    assert error.startswith(f"gradlab: fit {codec}: no kind of fit")
    assert error.strip().endswith(f"{how} --out FILE")


@pytest.mark.parametrize("method", ["gradiveq", "ecsq", "signs", "lgreco", "lgc", "uniform"])
def test_the_help_of_a_fit_lists_every_setting(gradlab: Command, method: str) -> None:
    """Its own with defaults, its codec's with what these say of themselves; at most 14 have an option."""
    from gradlab.cli.fit.methods import METHODS

    code, text, _ = gradlab("fit", method, "--help")
    words, kind = " ".join(text.split()), METHODS[method]
    assert code == 0
    assert f"gradlab fit {method} trace" in words
    options = text.partition("Options:")[2].partition("Settings (-s NAME=VALUE):")[0]
    assert len(re.findall(r"^  -", options, re.MULTILINE)) <= 15  # --help too
    of_codec = fields_of(codecs.get(kind.listed).Settings) if kind.listed else ()
    for field in (*fields_of(kind), *of_codec):
        option = field.name in kind.with_option()
        shown = f"--{field.name.replace('_', '-')} " if option else f"{field.name}={field.default}"
        assert shown in f"{words} ", field.name
        if field in of_codec and not option:
            assert field.about.help.rstrip(".").lower() in words.lower()
