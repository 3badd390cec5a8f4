"""Record a training on two ranks, ask what to train with, fit compressors, train compressed, compare: three minutes.

The link between the ranks is limited to 50 Mbit/s where the system lets a user do that (Linux, with tc and unshare), so
that there is something to gain. Elsewhere the ranks exchange at this machine's own speed.

Example:

  gradlab demo --out gradlab-demo
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlab.analysis.fit.gradiveq import RECOMMENDED, GradiveqFit, fit_gradiveq
from gradlab.analysis.fit.uniform import uniform_artifact
from gradlab.analysis.forecast import Network
from gradlab.analysis.forecast.endings import MAX_LOSS
from gradlab.analysis.forecast.link import Link, parse_bandwidth, spell_rate
from gradlab.analysis.forecast.network import Profile
from gradlab.analysis.forecast.recommendation import Recommendation, recommend
from gradlab.analysis.measure.spectrum import TraceSpectrum, measure_spectrum
from gradlab.analysis.questions.runs import comparison_table, final_score, metric_of
from gradlab.analysis.replay import replay as replayed_on
from gradlab.analysis.replay.result import Replay
from gradlab.analysis.report.recommended import Search
from gradlab.analysis.report.trace_report import summarize_trace, write_comparison
from gradlab.cli.console import Answer, print_json, progress_bars, say
from gradlab.cli.options import AsJson
from gradlab.errors import GradlabError
from gradlab.formatting import format_seconds
from gradlab.plan import Plan, Schedule
from gradlab.progress import Progress
from gradlab.trace import Trace
from gradlab.training.launch import launch, save_report
from gradlab.training.limited_link import why_no_limited_link
from gradlab.training.settings import TrainSettings

WORKLOAD, RANKS, LINK = "digits", 2, "50mbit"
_LATENCY = 1e-4  # seconds, on this machine
PLAIN, ANSWER = "dense", "recommended"


@dataclass(frozen=True)
class Offline:
    """Results of the recording: the answer on its link, artifacts and replays by method, the GradiVeQ fit, and figures
    of the report.
    """

    answer: Recommendation
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
    problem = why_no_limited_link(LINK, RANKS)
    link = None if problem else LINK
    with progress_bars() as progress:
        runs, offline = _loop(out, steps, link, progress)
        page = _report(out, runs, offline, progress)
    lines = [*what_happened(offline.answer, runs, link), *([problem] if problem else [])]
    if as_json:
        print_json({"report": str(page), "runs": runs, "answer": offline.answer.to_json(), "happened": lines})
    else:
        _print(lines, runs, offline, page)


def _loop(out: Path, steps: int, link: str | None, progress: Progress) -> tuple[dict[str, dict[str, Any]], Offline]:
    """Record, ask and fit, then train each method. The first quarter is dense, and all the fit sees."""
    common: dict[str, Any] = {"workload": WORKLOAD, "ranks": RANKS, "steps": steps, "link": link}
    on = "" if link is None else f", on links of {spell_rate(parse_bandwidth(link))}"
    say(f"1/4 recording {steps} steps of {WORKLOAD} on {RANKS} ranks{on}")
    launch(TrainSettings(**common, name="recording", capture=str((out / "trace").absolute())), progress, say)
    say("2/4 asking what pays on this link, fitting and replaying")
    with Trace(out / "trace") as trace:
        offline = _offline(trace, out, steps // 4, link, progress)
    say(f"3/4 training again, compressed: {', '.join(offline.artifacts)}")
    runs = {}
    for name, artifact in offline.artifacts.items():
        runs[name] = launch(TrainSettings(**common, name=name, artifact=str(artifact.absolute())), progress, say)
        save_report(runs[name], out / f"{name}.json")
    say("4/4 writing the report")
    return runs, offline


def _offline(trace: Trace, out: Path, warmup: int, link: str | None, progress: Progress) -> Offline:
    answer, chosen = _asked(trace, link, progress)
    # PCA sees the end of the dense phase: the freshest gradients it can have before it is needed.
    samples = max(2, min(100, warmup - warmup // 4))
    fit = fit_gradiveq(trace, samples=samples, settings=RECOMMENDED, warmup_steps=warmup, progress=progress)
    plans = {
        PLAIN: Plan.uniform(trace.layers, "identity", warmup_steps=warmup),
        **({} if chosen is None else {ANSWER: replace(chosen, schedule=Schedule(warmup))}),
        "gradiveq": fit.plan,
        "topk": Plan.uniform(trace.layers, "topk", density=0.01, warmup_steps=warmup),
        "powersgd": Plan.uniform(trace.layers, "powersgd", rank=2, warmup_steps=warmup),
    }
    replays = {name: replayed_on(trace, plan, progress=progress) for name, plan in plans.items()}
    made = {name: uniform_artifact(plan, replays[name]) for name, plan in plans.items()}
    made["gradiveq"] = fit.artifact()
    paths = {name: made[name].save(out / f"{name}.safetensors") for name in plans}
    spectrum = measure_spectrum(trace, progress=progress)
    return Offline(answer, paths, replays, fit, spectrum, summarize_trace(trace))


def _asked(trace: Trace, link: str | None, progress: Progress) -> tuple[Recommendation, Plan | None]:
    """Ask what to train with between as many nodes as were recorded, over the link or at the recorded speed."""
    assert trace.times is not None
    rate = parse_bandwidth(link) if link else trace.times.bits_per_second or parse_bandwidth("1gbit")
    network = Network([Link(rate, _LATENCY)], [RANKS], Profile.as_recorded(trace.times))
    tried, _ = Search(trace, {}, network, fsdp=False, quick=True).tried(MAX_LOSS, 1, progress)
    assert tried.speed is not None
    [answer] = recommend(tried.speed)
    return answer, None if answer.plan is None else tried.plans[answer.plan]


def what_happened(answer: Recommendation, runs: Mapping[str, Any], link: str | None) -> list[str]:
    """Say what was recommended and what its run took, beside the forecast and plain DDP."""
    plain, lines = runs[PLAIN], [answer.text]
    if ANSWER in runs:
        run, metric = runs[ANSWER], metric_of(runs.values())
        step, before = (format_seconds(one["step_seconds"], 2) for one in (run, plain))
        ended, dense = (metric.text(final_score(one)) for one in (run, plain))
        forecast = format_seconds(answer.seconds, 2)
        lines.append(
            f"Trained so: {answer.plan} took {step} a step (forecast {forecast}), plain averages {before}; "
            f"{metric.name} {ended} instead of {dense}."
        )
    return lines


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


def _print(lines: list[str], runs: dict[str, dict[str, Any]], offline: Offline, page: Path) -> None:

    table = comparison_table(runs, {name: replayed.to_json() for name, replayed in offline.replays.items()})
    warnings = [f"gradiveq: {line}" for line in offline.fit.warnings]
    Answer([*lines, *warnings], tables=[table], notes=[table.note, f"Report: {page}"]).print()
