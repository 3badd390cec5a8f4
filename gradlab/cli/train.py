"""Train a workload on this machine's ranks: plain, recorded (--capture) or compressed (--compress).

Settings (-s NAME=VALUE): learning_rate (peak), momentum (of the optimizer) and train_limit (the first so many training
samples; the recipe has the defaults); seed=0 (of model, data order and augmentation); every=1 (record every so many
steps); bucket_cap_mb=25 (DDP's buckets, MiB); threads=1 (per rank); deterministic=false (means in rank order, as the
replay takes them); trace_steps=[10,11] (of --chrome-trace);
link=50mbit (limits each rank's link to this speed, on Linux with tc and unshare).

Examples:

  gradlab train digits --ranks 2 --capture trace

  gradlab train digits --ranks 2 --compress plan.safetensors --out run.json

  gradlab train cifar10 --data cifar10.npz --steps 200 --capture trace

  gradlab train digits --emulate 16 --batch-size 16 --capture trace

  gradlab train text_bytes --data book.txt --capture trace --budget 2GB

  gradlab train text_chars --data tinyshakespeare.txt --emulate 4 --batch-size 3 --capture trace
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradlab.cli.console import Table, print_json, print_table, progress_bars, say
from gradlab.cli.options import AsJson, Settings
from gradlab.errors import GradlabError
from gradlab.setting_texts import parse_settings

if TYPE_CHECKING:
    from gradlab.training.settings import TrainSettings

WORKLOADS = "digits (bundled); cifar10, fashion_mnist, camvid, text_bytes, text_chars, text_words (need --data)."


def train(
    workload: Annotated[str, typer.Argument(help=WORKLOADS)],
    ranks: Annotated[int | None, typer.Option(help="Processes on this machine, under torchrun; 2 by default.")] = None,
    emulate: Annotated[
        int | None,
        typer.Option(metavar="N", help="Number of nodes that one process plays in turn, for --capture."),
    ] = None,
    capture: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for a recording of all ranks' gradients.")
    ] = None,
    compress: Annotated[Path | None, typer.Option(metavar="ARTIFACT", help="Plan to train with.")] = None,
    data: Annotated[Path | None, typer.Option(help="Data set file or folder, for workloads that need one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="File for the run's report, as JSON.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps; the workload's recipe by default.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="The whole trace at most, as 20GB: fewer steps are recorded, and blocks of large layers.",
        ),
    ] = None,
    chrome_trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for some steps' spans of all ranks, for Perfetto.")
    ] = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the run's numbers while it trains: gradlab watch.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    if ranks is not None and emulate is not None:
        raise GradlabError("a run has either ranks (--ranks) or emulated nodes (--emulate), not both")
    from gradlab.training.settings import read_settings

    run = read_settings(
        parse_settings(settings or []),
        workload=workload,
        data=_absolute(data),
        ranks=next((number for number in (emulate, ranks) if number is not None), 2),
        steps=steps,
        batch_size=batch_size,
        capture=_absolute(capture),
        budget=budget,
        artifact=_absolute(compress),
        name=compress.stem if compress else ("recorded" if capture else "plain"),
        emulate=emulate is not None,
        log=_absolute(log),
    )
    spans = () if chrome_trace is None else run.trace_steps or (10, 11)
    _train(replace(run, trace_steps=spans), out, chrome_trace, as_json)


def _absolute(path: Path | None) -> str | None:
    return None if path is None else str(path.absolute())


def _train(settings: TrainSettings, out: Path | None, chrome_trace: Path | None, as_json: bool) -> None:
    from gradlab.training.checks import require_ready
    from gradlab.training.launch import launch, save_report
    from gradlab.training.trainer import emulate

    settings.check()
    for file in (out, chrome_trace, settings.log and Path(settings.log)):
        if file:
            if file.exists():
                raise GradlabError(f"{file} exists already: choose another name")
            file.parent.mkdir(parents=True, exist_ok=True)  # better refused now than after the training
    require_ready(settings)
    with progress_bars() as progress:
        report = emulate(settings, progress) if settings.emulate else launch(settings, progress, say)
    events = report.pop("chrome_trace", None)
    if chrome_trace is not None:
        save_report({"traceEvents": events}, chrome_trace)
    if out is not None:
        save_report(report, out)
    print_json(report) if as_json else _print(report)
    _say_more(report)


def _print(report: dict[str, Any]) -> None:
    from gradlab.formatting import format_bytes, format_seconds
    from gradlab.metric import Metric, final_score
    from gradlab.saving import Saving

    metric, emulated = Metric(**report["metric"]), report.get("emulated", False)
    rows = [
        ("steps", str(report["steps"])),
        (f"final {metric.name}", metric.text(final_score(report))),
        ("final loss (last 10 steps)", f"{report['final_loss']:.4f}"),
        ("step time (median)" + (", all nodes in turn" if emulated else ""), format_seconds(report["step_seconds"])),
    ]
    if "time" in report:
        rows += [
            ("payload per step", format_bytes(report["payload_bytes_per_step"]["mean"])),
            ("wire per step", format_bytes(report["wire_bytes_per_step"]["mean"])),
            ("compression ratio", str(Saving.read(report))),
            *((f"{part} per step", format_seconds(value)) for part, value in report["time"].items()),
        ]
    rows += [
        (
            "recorded of all nodes" if emulated else f"recorded by rank {rank}",
            f"{row['steps_written']} steps, {format_bytes(row['bytes_written'])}",
        )
        for rank, row in enumerate(report["recorded"])
    ]
    kind = "emulated nodes" if emulated else "ranks"
    print_table(Table(f"{report['workload']}, {report['world_size']} {kind}: {report['name']}", ("", ""), rows))


def _say_more(report: dict[str, Any]) -> None:
    """Print on standard error what holds for residuals, which rules fired, and which steps were not recorded."""
    from gradlab.executor.rules import Finding, sentences

    if report.get("residuals"):
        say(report["residuals"])
    for line in sentences(tuple(map(Finding.from_json, report.get("rules", ()))), report["world_size"]):
        say(f"warning: {line}")
    for row in report["recorded"]:
        if row["steps_lost"]:
            say(f"warning: {row['path']}: {row['steps_lost']} steps were not recorded ({row['reason']})")
