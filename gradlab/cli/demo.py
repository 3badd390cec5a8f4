"""Record a training on two ranks, analyse it, fit compressors, train compressed, compare; about two minutes.

Example:

  gradlab demo --out gradlab-demo
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.fit.gradiveq import RECOMMENDED, GradiveqFit, fit_gradiveq
from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.questions.runs import comparison_table
from gradlab.analysis.replay import replay
from gradlab.analysis.replay.result import Replay
from gradlab.analysis.report.trace_report import summarize_trace, write_comparison
from gradlab.cli.console import Answer, print_json, progress_bars, say
from gradlab.cli.options import AsJson
from gradlab.errors import GradlabError
from gradlab.plan import Plan
from gradlab.progress import Progress
from gradlab.trace import Trace
from gradlab.training.launch import launch, save_report
from gradlab.training.settings import TrainSettings

WORKLOAD, RANKS = "digits", 2


@dataclass(frozen=True)
class Offline:
    """Results of the recording: artifacts by method, replays, the GradiVeQ fit, and measurements for the report."""

    artifacts: dict[str, Path]
    replays: dict[str, Replay]
    fit: GradiveqFit
    spectrum: TraceSpectrum
    summary: dict[str, Any]


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for everything the demo makes; new or empty.")
    ] = Path("gradlab-demo"),
    steps: Annotated[int, typer.Option(help="Optimizer steps of each run.")] = 240,
    as_json: AsJson = False,
) -> None:
    if steps < 30:
        raise GradlabError(f"steps = {steps}: the demo records, fits and compresses, it needs at least 30")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise GradlabError(f"{out} exists and is not empty: choose another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    with progress_bars() as progress:
        runs, offline = _loop(out, steps, progress)
        page = _report(out, runs, offline, progress)
    if as_json:
        print_json({"report": str(page), "runs": runs})
    else:
        _print(runs, offline, page)


def _loop(out: Path, steps: int, progress: Progress) -> tuple[dict[str, dict[str, Any]], Offline]:
    """Record, analyse and fit, then train each method. The first quarter is dense, and all the fit sees."""
    common: dict[str, Any] = {"workload": WORKLOAD, "ranks": RANKS, "steps": steps}
    say(f"1/4 recording {steps} steps of {WORKLOAD} on {RANKS} ranks")
    launch(TrainSettings(**common, name="recording", capture=str((out / "trace").absolute())), progress, say)
    say("2/4 measuring, fitting and replaying")
    with Trace(out / "trace") as trace:
        offline = _offline(trace, out, steps // 4, progress)
    say(f"3/4 training again, compressed: {', '.join(offline.artifacts)}")
    runs = {}
    for name, artifact in offline.artifacts.items():
        runs[name] = launch(TrainSettings(**common, name=name, artifact=str(artifact.absolute())), progress, say)
        save_report(runs[name], out / f"{name}.json")
    say("4/4 writing the report")
    return runs, offline


def _offline(trace: Trace, out: Path, warmup: int, progress: Progress) -> Offline:

    # PCA sees the end of the dense phase: the freshest gradients it can have before it is needed.
    samples = max(2, min(100, warmup - warmup // 4))
    fit = fit_gradiveq(trace, samples=samples, settings=RECOMMENDED, warmup_steps=warmup, progress=progress)
    plans = {
        "dense": Plan.uniform(trace.layers, "identity", warmup_steps=warmup),
        "gradiveq": fit.plan,
        "topk": Plan.uniform(trace.layers, "topk", density=0.01, warmup_steps=warmup),
        "powersgd": Plan.uniform(trace.layers, "powersgd", rank=2, warmup_steps=warmup),
    }
    replays = {name: replay(trace, plan, progress=progress) for name, plan in plans.items()}
    made = {name: uniform_artifact(plan, replays[name]) for name, plan in plans.items()}
    made["gradiveq"] = fit.artifact()
    paths = {name: made[name].save(out / f"{name}.safetensors") for name in plans}
    spectrum = measure_spectrum(trace, progress=progress)
    return Offline(paths, replays, fit, spectrum, summarize_trace(trace))


def _report(out: Path, runs: dict[str, dict[str, Any]], offline: Offline, progress: Progress) -> Path:

    return write_comparison(
        out / "report",
        runs=runs,
        replays=offline.replays,
        fits={"gradiveq": offline.fit},
        trace_summary=offline.summary,
        spectrum=offline.spectrum,
        progress=progress,
    )


def _print(runs: dict[str, dict[str, Any]], offline: Offline, page: Path) -> None:

    verdict = json.loads((page.parent / "report.json").read_text("utf-8"))["verdict"]
    table = comparison_table(runs, {name: replayed.to_json() for name, replayed in offline.replays.items()})
    lines = [verdict, *(f"gradiveq: {line}" for line in offline.fit.warnings)]
    Answer(lines, tables=[table], notes=[table.note, f"Report: {page}"]).print()
